"""Parameter servers in a Trainer: ranks run at different speeds, and cancelled passes are repeated."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from torch import Tensor

from lightning_pipesync import ParameterServerStrategy
from lightning_pipesync.methods.servers.messages import Update
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import assert_refused, on_ranks, raised
from tests.support.lightning_models import Classifier, train_loader, trainer, val_loader
from tests.support.lost_ranks import wait_for

BATCHES = 8


class Uneven(Classifier):
    """Rank 1 waits before the forward pass of a batch until rank 0 has trained on all batches."""

    def __init__(self, folder: Path, waits_at: int) -> None:
        super().__init__()
        self.ended, self.waits_at = folder / "ended", waits_at
        self.begun: list[int] = []
        self.log_of_updates: list[Update] = []
        self.metrics: dict[str, float] = {}

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
        self.log_of_updates, self.metrics = method.log, method.metrics()


def fit(settings: dict[str, Any], folder: Path, waits_at: int = 3) -> tuple[list[int], list[Update], dict[str, float]]:
    folder.mkdir(exist_ok=True)
    strategy = ParameterServerStrategy(keep_log=True, timeout_s=60, **settings)
    run = trainer(strategy, 2, folder, max_epochs=1, limit_train_batches=BATCHES)
    module = Uneven(folder, waits_at)
    run.fit(module, train_loader())
    return module.begun, module.log_of_updates, module.metrics


def validate(settings: dict[str, Any], folder: Path) -> tuple[list[Tensor], int]:
    """Trains two epochs, and a third one from the checkpoint of the second; returns what was validated, and steps."""
    validated: list[Tensor] = []
    for epochs, path in ((2, None), (3, folder / "last.ckpt")):
        module = Classifier("adamw")
        fitting = trainer(ParameterServerStrategy(timeout_s=60, **settings), 2, folder, max_epochs=epochs)
        fitting.fit(module, train_loader(), val_loader(), ckpt_path=path)
        fitting.save_checkpoint(folder / "last.ckpt")
        validated += module.validated_with
    return validated, fitting.global_step


def refuse(settings: dict[str, Any], folder: Path) -> tuple[str, str] | None:
    return raised(lambda: fit(settings, folder))


MOVING: dict[str, dict[str, Any]] = {"downpour": {"n_push": 3}, "easgd": {"period": 3}, "diloco": {"period": 3}}
REFUSED: dict[str, dict[str, Any]] = {"k=3": {"policy": "k_sync", "k": 3}, "servers=3": {"servers": 3}}


@pytest.fixture(scope="module")
def trained(folder: Path) -> Outcomes:
    cases = {
        **{policy: partial(fit, {"policy": policy}, folder / policy) for policy in ("async", "downpour")},
        "cancelled": partial(fit, {"policy": "k_sync", "k": 1}, folder / "cancelled", 0),
        **{("validate", p): partial(validate, {"policy": p, **given}, folder / p) for p, given in MOVING.items()},
        **{words: partial(refuse, settings, folder / words) for words, settings in REFUSED.items()},
    }
    return launch_cases(cases, 2, init=False)


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
    for one, same in zip(validated, other, strict=True):
        assert torch.equal(one, same)
    assert not torch.equal(validated[1], validated[2])


@pytest.mark.parametrize("words", REFUSED)
def test_settings_for_more_ranks_are_refused(words: str, trained: Outcomes) -> None:
    for outcome in trained[words]:
        assert_refused({words: outcome})


def save_often(folder: Path) -> tuple[int, int]:
    """Of three ranks any two make an update; the last one would be alone at a checkpoint that the others wait for."""
    folder.mkdir(exist_ok=True)
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
    strategy = ParameterServerStrategy(policy="k_async", k=2, timeout_s=60)
    fitting = trainer(strategy, 3, folder, max_epochs=1, enable_checkpointing=True, callbacks=[saver])
    fitting.fit(Classifier(), train_loader())
    return fitting.global_step, len(list(folder.glob("*.ckpt")))


def test_a_checkpoint_every_few_steps_where_some_ranks_make_an_update(folder: Path) -> None:
    for steps, saved in on_ranks(save_often, 3, folder / "often", init=False):
        assert saved == steps // 2 > 1


def validate_late(folder: Path) -> list[int]:
    """Of three ranks any two make an update; with seven batches of each, one gradient is left over in an epoch."""
    strategy = ParameterServerStrategy(policy="k_async", k=2, timeout_s=30)
    fitting = trainer(strategy, 3, folder, max_epochs=2, check_val_every_n_epoch=2, limit_train_batches=5)
    module = Classifier()
    fitting.fit(module, train_loader(), val_loader())
    return [fitting.global_step, len(module.validated_with)]


def test_a_validation_that_makes_its_loaders_late_waits_for_no_gradient(folder: Path) -> None:
    assert on_ranks(validate_late, 3, folder / "late", init=False) == [[10, 1]] * 3


def agree(folder: Path) -> dict[str, tuple[str, str] | None]:
    """What has all ranks agree after each batch."""
    cases: dict[str, dict[str, Any]] = {
        "Trainer(max_time=...)": {"max_time": {"hours": 1}},
        "train_time_interval": {
            "callbacks": [ModelCheckpoint(folder, train_time_interval=timedelta(hours=1))],
            "enable_checkpointing": True,
        },
        "search for a learning rate": {"callbacks": [LearningRateFinder()]},
    }
    found = {}
    for words, options in cases.items():
        fitting = trainer(ParameterServerStrategy(), 2, folder, **options)
        found[words] = raised(partial(fitting.fit, Classifier(), train_loader()))
    return found


def test_what_would_make_ranks_wait_after_each_batch_is_refused(folder: Path) -> None:
    for outcome in on_ranks(agree, 2, folder, init=False):
        assert_refused(outcome)


def validate_by_the_clock(folder: Path) -> tuple[str, str] | None:
    fitting = trainer("dear", 2, folder, val_check_interval={"seconds": 1}, max_epochs=1)
    return raised(lambda: fitting.fit(Classifier(), train_loader(), val_loader()))


def test_a_validation_by_the_clock_is_refused(folder: Path) -> None:
    for outcome in on_ranks(validate_by_the_clock, 2, folder, init=False):
        assert_refused({"val_check_interval=...) is a time, of 1 s, and each rank looks at its own clock": outcome})
