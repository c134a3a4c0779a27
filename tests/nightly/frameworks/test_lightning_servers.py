"""Parameter servers in a Trainer: ranks run at different speeds, repeat cancelled passes, and share a queue of work."""

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

from lightning_pipesync import ParameterServerStrategy
from tests.support.case_table import Outcomes, launch_cases
from tests.support.lightning_models import SAMPLES, Classifier, fit, train_loader, trainer, val_loader
from tests.support.lost_ranks import wait_for

Settings = dict[str, Any]
SERVERS = {"name": "parameter_server", "timeout_s": 60}
BATCHES = 8


class Waiting(Classifier):
    """Rank 1 waits before the forward pass of a batch until rank 0 has trained on all batches."""

    def __init__(self, ended: Path, waits_at: int) -> None:
        super().__init__()
        self.ended, self.waits_at = ended, waits_at
        self.begun: list[int] = []

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        self.begun.append(batch_idx)
        if self.global_rank == 1 and batch_idx == self.waits_at:
            wait_for(self.ended.exists)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 0 and batch_idx == BATCHES - 1:
            self.ended.touch()

    def on_train_end(self) -> None:
        method = self.trainer.strategy.method
        self.updates, self.metrics = method.log, method.metrics()


def fit_waiting(folder: Path, waits_at: int, **settings: Any) -> tuple[list[int], list[Any], dict[str, float]]:
    strategy = ParameterServerStrategy(keep_log=True, timeout_s=60, **settings)
    module = Waiting(folder / f"ended {settings}", waits_at)
    trainer(strategy, 2, folder, max_epochs=1, limit_train_batches=BATCHES).fit(module, train_loader())
    return module.begun, module.updates, module.metrics


def validate(folder: Path, settings: Settings) -> tuple[list[Tensor], int]:
    """Trains two epochs, and a third one from the checkpoint of the second; returns what was validated, and steps."""
    run = partial(fit, folder, {**SERVERS, **settings}, {"optimizer": "adamw"}, saved=f"{settings}.ckpt")
    whole, further = run(max_epochs=2), run(max_epochs=3, resume=folder / f"{settings}.ckpt")
    return [*whole["validated_with"], *further["validated_with"]], further["steps"]


MOVING: dict[str, Settings] = {"downpour": {"n_push": 3}, "easgd": {"period": 3}, "diloco": {"period": 3}}
#: Batches of 16 that rank 0 has begun before rank 1, which asks for one more ahead, trains on its first one.
AHEAD = 11
EPOCHS = 3
#: Of a batch: with 5 samples an epoch has 13 batches, so that one of two ranks has more of them at any pace.
SIZES = {4: 16, 5: 13}


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
        time.sleep(0.02 * self.global_rank)
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


def fit_queue(
    folder: Path, policy: str, size: int = 4, num_workers: int = 0, resume: Path | None = None, **given: Any
) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    module = Uneven(folder, lets=policy == "async", plateau=True)
    given |= {"enable_checkpointing": True, "callbacks": [ModelCheckpoint(folder, "{epoch}", save_top_k=-1)]}
    strategy = ParameterServerStrategy(partition="work_queue", policy=policy, timeout_s=60)
    fitting = trainer(strategy, 2, folder, max_epochs=EPOCHS, **given)
    fitting.fit(module, train_loader(size, num_workers=num_workers), val_loader(), ckpt_path=resume)
    position = module.lr_schedulers()[0].last_epoch
    return {"epochs": module.of_epochs, "validated": module.validated_with, "position": position}


def fit_until(folder: Path, accumulated: int, given: dict[str, Any]) -> tuple[list[list[int]], int]:
    """Returns the samples that a rank had in each epoch, and ``max_steps`` after the training."""
    folder = folder / f"{accumulated} {given}"
    folder.mkdir(exist_ok=True)
    module = Uneven(folder)
    strategy = ParameterServerStrategy(partition="work_queue", timeout_s=60)
    fitting = trainer(strategy, 2, folder, accumulate_grad_batches=accumulated, **given)
    fitting.fit(module, train_loader(4), val_loader())
    return module.of_epochs, fitting.max_steps


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


@pytest.fixture(scope="module")
def trained(folder: Path) -> Outcomes:
    cases: dict[Any, Any] = {one: partial(fit_queue, folder / one[0], *one) for one in FITS}
    cases["resumed"] = partial(fit_queue, folder / "on", "async", resume=folder / "async" / "epoch=0.ckpt")
    cases["reloaded"] = partial(fit_queue, folder / "reloaded", "sync", 5, reload_dataloaders_every_n_epochs=1)
    for given, accumulated, _ in UNTIL:
        cases[str(given), accumulated] = partial(fit_until, folder, accumulated, given)
    cases |= {policy: partial(fit_waiting, folder, 3, policy=policy) for policy in ("async", "downpour")}
    cases["cancelled"] = partial(fit_waiting, folder, 0, policy="k_sync", k=1)
    cases |= {("validate", p): partial(validate, folder, {"policy": p, **given}) for p, given in MOVING.items()}
    return launch_cases(cases, 2, init=False)


@pytest.fixture(scope="module")
def trained_by_three(folder: Path) -> Outcomes:
    """Any two of three ranks make an update; the last one would be alone where the others wait for it."""
    settings = {**SERVERS, "policy": "k_async", "k": 2}
    saver = ModelCheckpoint(folder / "often", "{step}", every_n_train_steps=2, save_top_k=-1)
    often = {"callbacks": [saver], "enable_checkpointing": True, "max_epochs": 1, "limit_val_batches": 0}
    late = {"check_val_every_n_epoch": 2, "limit_train_batches": 5}
    cases = {name: partial(fit, folder, settings, **how) for name, how in (("often", often), ("late", late))}
    return launch_cases(cases, 3, init=False)


@pytest.mark.parametrize("policy", ["async", "downpour"])
def test_a_slow_rank_does_not_slow_down_the_others(policy: str, trained: Outcomes) -> None:
    """What the Trainer itself sends before each batch does not, either."""
    _, log, metrics = trained[policy][0]
    assert metrics["updates"] == 2 * BATCHES
    assert [update.gradients[0].rank for update in log[-BATCHES + 3 :]] == [1] * (BATCHES - 3)


def test_a_cancelled_pass_is_repeated(trained: Outcomes) -> None:
    (fast, log, _), (slow, _, metrics) = trained["cancelled"]
    assert fast == list(range(BATCHES))
    assert sorted(set(slow)) == list(range(BATCHES))
    assert BATCHES < len(slow) <= BATCHES + metrics["cancelled"], "its first batch has been repeated"
    assert [update.staleness for update in log] == [[0]] * len(log)


@pytest.mark.parametrize("policy", MOVING)
def test_learners_that_move_their_weights_validate_the_servers_weights(policy: str, trained: Outcomes) -> None:
    (validated, steps), (other, _) = trained["validate", policy]
    assert len(validated) == 3
    assert steps == 3 * BATCHES
    assert all(map(torch.equal, validated, other))
    assert not torch.equal(validated[1], validated[2])


def test_where_some_ranks_make_an_update_the_others_are_not_waited_for(
    trained_by_three: Outcomes, folder: Path
) -> None:
    """Neither at a checkpoint every few steps, nor where a validation makes its loaders late."""
    for often, late in zip(trained_by_three["often"], trained_by_three["late"], strict=True):
        assert len(list((folder / "often").glob("*.ckpt"))) == often["steps"] // 2 > 1
        assert (late["steps"], len(late["validated_with"])) == (10, 1)


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
        assert policy != "async" or len(of_fast) > len(of_slow)
    assert fast["epochs"][0] != fast["epochs"][1]
    assert len(fast["validated"]) == len(slow["validated"]) == EPOCHS
    assert all(map(torch.equal, fast["validated"], slow["validated"]))


def test_epochs_whose_loaders_are_made_anew_or_that_are_resumed(trained: Outcomes) -> None:
    """A rank with more batches does not wait for others that make their validation loaders."""
    assert_whole_epochs(*trained["reloaded"], EPOCHS, 5)
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
