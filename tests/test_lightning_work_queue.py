"""Batches from a work queue in a Trainer: an epoch is the whole data set, whoever trains on which part of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, IterableDataset

from lightning_pipesync import ParameterServerStrategy
from tests.harness import launch, raised
from tests.lightning_models import SAMPLES, Classifier, dataset, train_loader, trainer, val_loader

EPOCHS = 3
#: Of a batch: with 5 samples an epoch has 13 batches, so that one of two ranks has more of them at any pace.
SIZES = {4: 16, 5: 13}


class Uneven(Classifier):
    """Rank 1 is slow; it has a scheduler that counts steps, and maybe one that waits for a metric."""

    def __init__(self, delay_s: float = 0.1, plateau: bool = False) -> None:
        super().__init__()
        self.delay_s, self.plateau = delay_s, plateau
        self.of_epochs: list[list[int]] = []

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        time.sleep(self.delay_s * self.global_rank)
        return super().training_step(batch, batch_idx)

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


def fit(folder: Path, policy: str, size: int = 4, num_workers: int = 0, resume: bool = False) -> dict[str, Any]:
    module = Uneven(plateau=True)
    checkpoint = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    fitting = trainer(
        strategy(policy=policy), 2, folder, max_epochs=EPOCHS, enable_checkpointing=True, callbacks=[checkpoint]
    )
    path = folder / "epoch=0.ckpt" if resume else None
    fitting.fit(module, train_loader(size, num_workers=num_workers), val_loader(), ckpt_path=path)
    position = module.lr_schedulers()[0].last_epoch
    return {"epochs": module.of_epochs, "validated": module.validated_with, "position": position}


@pytest.mark.parametrize(
    ("policy", "size", "num_workers"), [("async", 4, 0), ("k_batch_async", 4, 2), ("sync", 5, 0), ("downpour", 5, 0)]
)
def test_every_sample_is_trained_on_once(policy: str, size: int, num_workers: int, tmp_path: Path) -> None:
    """The fast rank has more of them, both validate the same weights, and schedulers follow the job, not a rank."""
    fast, slow = launch(fit, 2, tmp_path, policy, size, num_workers, init=False)
    for of_fast, of_slow in zip(fast["epochs"], slow["epochs"], strict=True):
        assert sorted(of_fast + of_slow) == list(range(SAMPLES))
        assert of_slow
        if policy == "async":
            assert len(of_fast) > len(of_slow)
    assert fast["epochs"][0] != fast["epochs"][1]
    assert len(fast["validated"]) == EPOCHS
    for one, other in zip(fast["validated"], slow["validated"], strict=True):
        assert torch.equal(one, other)
    for outcome in (fast, slow):
        assert outcome["position"] == EPOCHS * SIZES[size] // 2


def test_resumes_after_an_epoch(tmp_path: Path) -> None:
    launch(fit, 2, tmp_path, "async", init=False)
    fast, slow = launch(fit, 2, tmp_path, "async", 4, 0, True, init=False)
    assert len(fast["epochs"]) == len(slow["epochs"]) == EPOCHS - 1
    for of_fast, of_slow in zip(fast["epochs"], slow["epochs"], strict=True):
        assert sorted(of_fast + of_slow) == list(range(SAMPLES))
    for outcome in (fast, slow):
        assert outcome["position"] == EPOCHS * SIZES[4] // 2


def fit_until(
    folder: Path, max_steps: int, accumulated: int, given: dict[str, Any]
) -> tuple[list[int], list[list[int]], int]:
    """Returns the batches that a rank had in each epoch, these, and ``max_steps`` after the training."""
    module = Uneven()
    fitting = trainer(strategy(), 2, folder, max_steps=max_steps, accumulate_grad_batches=accumulated, **given)
    fitting.fit(module, train_loader(4), val_loader())
    return [len(epoch) // 4 for epoch in module.of_epochs], module.of_epochs, fitting.max_steps


@pytest.mark.parametrize(
    ("max_steps", "accumulated", "per_epoch"),
    [(10, 1, [16, 4]), (5, 2, [16, 4]), (8, 1, [16]), (3, 1, [6])],
)
def test_max_steps_are_those_of_an_average_rank(
    max_steps: int, accumulated: int, per_epoch: list[int], tmp_path: Path
) -> None:
    """Two ranks together train on as many batches as two of DDP would."""
    fast, slow = launch(fit_until, 2, tmp_path, max_steps, accumulated, {"max_epochs": -1}, init=False)
    assert [one + other for one, other in zip(fast[0], slow[0], strict=True)] == per_epoch
    for of_fast, of_slow, batches in zip(fast[1], slow[1], per_epoch, strict=True):
        assert len(set(of_fast + of_slow)) == 4 * batches
    assert fast[2] == slow[2] == max_steps


def test_a_fast_dev_run_is_a_batch_on_each_rank(tmp_path: Path) -> None:
    outcomes = launch(fit_until, 2, tmp_path, -1, 1, {"fast_dev_run": True}, init=False)
    assert [batches for batches, *_ in outcomes] == [[1], [1]]


class Numbers(IterableDataset):
    def __iter__(self) -> Any:
        return iter(dataset())


def refuse(settings: dict[str, Any], folder: Path) -> tuple[str, str] | None:
    callbacks = [ModelCheckpoint(folder, **settings.pop("saves"))] if "saves" in settings else []
    loader = settings.pop("loader") if "loader" in settings else train_loader()
    fitting = trainer(strategy(), 2, folder, callbacks=callbacks, enable_checkpointing=bool(callbacks), **settings)
    return raised(lambda: fitting.fit(Uneven(0.0), loader, val_loader()))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"min_steps": 5}, "Trainer(min_steps=...) counts the steps of a rank"),
        ({"max_time": {"seconds": 50}}, "Trainer(max_time=...) counts"),
        ({"val_check_interval": 5}, "Trainer(val_check_interval=...) counts"),
        ({"overfit_batches": 2}, "Trainer(overfit_batches=...) counts"),
        ({"saves": {"every_n_train_steps": 3}}, "ModelCheckpoint(every_n_train_steps=...) counts"),
        ({"loader": DataLoader(Numbers(), 4)}, "this loader has Numbers"),
        ({"loader": train_loader(64)}, "1 batches to hand out, too few for 2 ranks"),
    ],
)
def test_what_ranks_would_count_differently_is_refused(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    for outcome in launch(refuse, 2, settings, tmp_path, init=False):
        assert outcome is not None
        assert outcome[0] == "ValueError"
        assert words in outcome[1]
