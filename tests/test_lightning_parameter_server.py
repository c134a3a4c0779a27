"""Parameter servers in a Trainer: ranks are not kept in step, and cancelled passes are made again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_pipesync import ParameterServerStrategy
from lightning_pipesync.methods.servers.messages import Update
from tests.harness import launch, raised
from tests.lightning_models import Classifier, train_loader, trainer, val_loader

BATCHES = 8


class Uneven(Classifier):
    """Rank 1 waits before each forward pass, and before its fourth one until rank 0 has trained on all batches."""

    def __init__(self, folder: Path, delay_s: float) -> None:
        super().__init__()
        self.ended, self.delay_s = folder / "ended", delay_s
        self.begun: list[int] = []
        self.log_of_updates: list[Update] = []
        self.metrics: dict[str, float] = {}

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        self.begun.append(batch_idx)
        time.sleep(self.delay_s * self.global_rank)
        while self.global_rank == 1 and batch_idx == 3 and not self.delay_s and not self.ended.exists():
            time.sleep(0.01)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 0 and batch_idx == BATCHES - 1:
            self.ended.touch()

    def on_train_end(self) -> None:
        method = self.trainer.strategy.method
        self.log_of_updates, self.metrics = method.log, method.metrics()


def fit(
    settings: dict[str, Any], folder: Path, delay_s: float = 0.0
) -> tuple[list[int], list[Update], dict[str, float]]:
    strategy = ParameterServerStrategy(keep_log=True, timeout_s=60, **settings)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        limit_train_batches=BATCHES,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Uneven(folder, delay_s)
    trainer.fit(module, train_loader())
    return module.begun, module.log_of_updates, module.metrics


@pytest.mark.parametrize("policy", ["async", "downpour"])
def test_a_slow_rank_does_not_slow_down_the_others(policy: str, tmp_path: Path) -> None:
    """Not even by what the Trainer itself sends before each batch."""
    _, log, metrics = launch(fit, 2, {"policy": policy}, tmp_path, init=False)[0]
    assert metrics["updates"] == 2 * BATCHES
    assert [update.gradients[0].rank for update in log[-BATCHES + 3 :]] == [1] * (BATCHES - 3)


def test_a_cancelled_pass_is_made_again(tmp_path: Path) -> None:
    (fast, log, _), (slow, _, metrics) = launch(fit, 2, {"policy": "k_sync", "k": 1}, tmp_path, 0.3, init=False)
    assert fast == list(range(BATCHES))
    assert sorted(set(slow)) == list(range(BATCHES))
    assert BATCHES < len(slow) <= BATCHES + metrics["cancelled"], "its first batches have been begun again"
    assert [update.staleness for update in log] == [[0]] * len(log)


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


@pytest.mark.parametrize("settings", [{"policy": "downpour", "n_push": 3}, {"policy": "easgd", "period": 3}])
def test_learners_with_weights_of_their_own_validate_the_servers(settings: dict[str, Any], tmp_path: Path) -> None:
    (validated, steps), (other, _) = launch(validate, 2, settings, tmp_path, init=False)
    assert len(validated) == 3
    assert steps == 3 * BATCHES
    for one, same in zip(validated, other, strict=True):
        assert torch.equal(one, same)
    assert not torch.equal(validated[1], validated[2])


def refuse(settings: dict[str, Any], folder: Path) -> tuple[str, str] | None:
    return raised(lambda: fit(settings, folder))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"policy": "k_sync", "k": 3}, "k=3"),
        ({"servers": 3}, "servers=3"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    for outcome in launch(refuse, 2, settings, tmp_path, init=False):
        assert outcome is not None
        assert outcome[0] == "ValueError"
        assert words in outcome[1]
