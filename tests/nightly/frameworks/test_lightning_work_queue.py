"""Batches from a work queue in a Trainer: an epoch is the whole data set, whoever trains on which part of it."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, IterableDataset

from lightning_pipesync import ParameterServerStrategy
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import assert_refused, raised
from tests.support.lightning_models import SAMPLES, Classifier, dataset, train_loader, trainer, val_loader
from tests.support.lost_ranks import wait_for

EPOCHS = 3
#: Of a batch: with 5 samples an epoch has 13 batches, so that one of two ranks has more of them at any pace.
SIZES = {4: 16, 5: 13}


#: Batches of 16 that rank 0 has begun before rank 1, which asks for one more ahead, trains on its first one.
AHEAD = 11


class Uneven(Classifier):
    """Rank 1 is slow; it has a scheduler that counts steps, and maybe one that waits for a metric.

    Both have a batch of an epoch before one trains on it. Of 16 batches rank 0 has most, if the policy ``lets`` it.
    """

    def __init__(self, marks: Path, lets: bool = False, plateau: bool = False) -> None:
        super().__init__()
        self.marks, self.lets, self.plateau = marks, lets, plateau
        self.of_epochs: list[list[int]] = []

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        self.mark(batch_idx, self.global_rank).touch()
        if batch_idx == 0:
            wait_for(self.mark(0, 1 - self.global_rank).exists)
        if batch_idx == 0 and self.global_rank == 1 and self.lets:
            wait_for(self.mark(AHEAD - 1, 0).exists)
        time.sleep(0.1 * self.global_rank)
        return super().training_step(batch, batch_idx)

    def mark(self, batch_idx: int, rank: int) -> Path:
        return self.marks / f"rank {rank} has begun batch {batch_idx} of epoch {self.current_epoch}"

    def on_train_epoch_end(self) -> None:
        self.of_epochs.append([index for batch in self.seen for index in batch])
        self.seen.clear()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        schedulers: list[Any] = [{"scheduler": StepLR(optimizer, 100), "interval": "step"}]
        if self.plateau:
            schedulers.append({"scheduler": ReduceLROnPlateau(optimizer), "monitor": "val_loss"})
        return [optimizer], schedulers


def strategy(**settings: Any) -> ParameterServerStrategy:
    return ParameterServerStrategy(partition="work_queue", timeout_s=60, **settings)


def fit(
    folder: Path, policy: str, size: int = 4, num_workers: int = 0, resume: bool = False, **given: Any
) -> dict[str, Any]:
    marks = folder / ("resumed" if resume else "trained")
    marks.mkdir(parents=True, exist_ok=True)
    module = Uneven(marks, lets=policy == "async", plateau=True)
    checkpoint = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    fitting = trainer(
        strategy(policy=policy),
        2,
        folder,
        max_epochs=EPOCHS,
        enable_checkpointing=True,
        callbacks=[checkpoint],
        **given,
    )
    path = folder / "epoch=0.ckpt" if resume else None
    fitting.fit(module, train_loader(size, num_workers=num_workers), val_loader(), ckpt_path=path)
    position = module.lr_schedulers()[0].last_epoch
    return {"epochs": module.of_epochs, "validated": module.validated_with, "position": position}


def fit_until(folder: Path, accumulated: int, given: dict[str, Any]) -> tuple[list[list[int]], int]:
    """Returns the samples that a rank had in each epoch, and ``max_steps`` after the training."""
    folder = folder / f"{accumulated} {given}"
    folder.mkdir(exist_ok=True)
    module = Uneven(folder)
    fitting = trainer(strategy(), 2, folder, accumulate_grad_batches=accumulated, **given)
    fitting.fit(module, train_loader(4), val_loader())
    return module.of_epochs, fitting.max_steps


class Numbers(IterableDataset):
    def __iter__(self) -> Any:
        return iter(dataset())


def refuse(settings: dict[str, Any], folder: Path) -> tuple[str, str] | None:
    callbacks = [ModelCheckpoint(folder, **settings.pop("saves"))] if "saves" in settings else []
    loader = settings.pop("loader") if "loader" in settings else train_loader()
    fitting = trainer(strategy(), 2, folder, callbacks=callbacks, enable_checkpointing=bool(callbacks), **settings)
    return raised(lambda: fitting.fit(Uneven(folder), loader, val_loader()))


#: The policy, the size of a batch, and the loader's workers, which are forked: first, before there are other threads.
FITS = [("k_batch_async", 4, 2), ("async", 4, 0), ("sync", 5, 0), ("downpour", 5, 0)]
#: Arguments of the Trainer, batches of a step, and the batches of all ranks in each epoch.
UNTIL: list[tuple[dict[str, Any], int, list[int]]] = [
    ({"max_steps": 10, "max_epochs": -1}, 1, [16, 4]),
    ({"max_steps": 5, "max_epochs": -1}, 2, [16, 4]),
    ({"max_steps": 8, "max_epochs": -1}, 1, [16]),
    ({"max_steps": 3, "max_epochs": -1}, 1, [6]),
    ({"fast_dev_run": True}, 1, [2]),
]
REFUSED: dict[str, dict[str, Any]] = {
    "Trainer(min_steps=...) counts the steps of a rank": {"min_steps": 5},
    "Trainer(max_time=...) counts": {"max_time": {"seconds": 50}},
    "Trainer(val_check_interval=...) counts": {"val_check_interval": 5},
    "Trainer(overfit_batches=...) counts": {"overfit_batches": 2},
    "Trainer(limit_train_batches=...) counts": {"limit_train_batches": 3},
    "ModelCheckpoint(every_n_train_steps=...) counts": {"saves": {"every_n_train_steps": 3}},
    "this loader has Numbers": {"loader": DataLoader(Numbers(), 4)},
    "1 batches to hand out, too few for 2 ranks": {"loader": train_loader(64)},
}


@pytest.fixture(scope="module")
def trained(folder: Path) -> Outcomes:
    cases: dict[Any, Any] = {one: partial(fit, folder / one[0], *one) for one in FITS}
    cases["resumed"] = partial(fit, folder / "async", "async", resume=True)
    cases["reloaded"] = partial(fit, folder / "reloaded", "sync", 5, reload_dataloaders_every_n_epochs=1)
    for given, accumulated, _ in UNTIL:
        cases[str(given), accumulated] = partial(fit_until, folder, accumulated, given)
    cases |= {words: partial(refuse, settings, folder) for words, settings in REFUSED.items()}
    return launch_cases(cases, 2, init=False)


def assert_whole_epochs(fast: dict[str, Any], slow: dict[str, Any], num_epochs: int, size: int) -> None:
    """Every sample is trained on once an epoch, and schedulers follow the job, not a rank."""
    assert len(fast["epochs"]) == num_epochs
    for of_fast, of_slow in zip(fast["epochs"], slow["epochs"], strict=True):
        assert sorted(of_fast + of_slow) == list(range(SAMPLES))
    for outcome in (fast, slow):
        assert outcome["position"] == EPOCHS * SIZES[size] // 2


@pytest.mark.parametrize(("policy", "size", "num_workers"), FITS)
def test_every_sample_is_trained_on_once(policy: str, size: int, num_workers: int, trained: Outcomes) -> None:
    """The fast rank has more of them, and both validate the same weights."""
    fast, slow = trained[policy, size, num_workers]
    assert_whole_epochs(fast, slow, EPOCHS, size)
    for of_fast, of_slow in zip(fast["epochs"], slow["epochs"], strict=True):
        assert of_slow
        if policy == "async":
            assert len(of_fast) > len(of_slow)
    assert fast["epochs"][0] != fast["epochs"][1]
    assert len(fast["validated"]) == len(slow["validated"]) == EPOCHS
    assert all(map(torch.equal, fast["validated"], slow["validated"]))


def test_a_rank_with_more_batches_does_not_wait_for_others_that_make_their_validation_loaders(
    trained: Outcomes,
) -> None:
    assert_whole_epochs(*trained["reloaded"], EPOCHS, 5)


def test_resumes_after_an_epoch(trained: Outcomes) -> None:
    assert_whole_epochs(*trained["resumed"], EPOCHS - 1, 4)


@pytest.mark.parametrize(("given", "accumulated", "per_epoch"), UNTIL)
def test_max_steps_are_those_of_an_average_rank(
    given: dict[str, Any], accumulated: int, per_epoch: list[int], trained: Outcomes
) -> None:
    """Two ranks together train on as many batches as two of DDP would; a fast run has one on each."""
    fast, slow = trained[str(given), accumulated]
    assert [len(one + other) for one, other in zip(fast[0], slow[0], strict=True)] == [4 * one for one in per_epoch]
    for of_fast, of_slow in zip(fast[0], slow[0], strict=True):
        assert len(set(of_fast + of_slow)) == len(of_fast + of_slow)
    if "fast_dev_run" in given:
        assert len(fast[0][0]) == len(slow[0][0]) == 4
    else:
        assert fast[1] == slow[1] == given["max_steps"]


@pytest.mark.parametrize("words", REFUSED)
def test_what_ranks_would_count_differently_is_refused(words: str, trained: Outcomes) -> None:
    for outcome in trained[words]:
        assert_refused({words: outcome})
