"""Trainers as jobs that are asked to leave: they end after the next round, and resume there from their checkpoints."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_pipesync import LocalSGDStrategy
from lightning_pipesync.methods.replicas.sections import Sections
from tests.nightly.jobs.test_replica_jobs_lost import when_called
from tests.support.harness import on_ranks
from tests.support.lightning_models import Classifier, dataset, trainer, val_loader
from tests.support.replica_jobs import TIMEOUT_S, become_replica, lighthouse

PERIOD, EPOCHS = 4, 2
#: The step in which all are asked, from 0 on; and the number of steps after which they leave.
ASKED, LEAVE = 9, 12


class Job(Classifier):
    """One of the jobs, which is asked to leave in a step, if there is one."""

    def __init__(self, asked: int | None) -> None:
        super().__init__(batch_norm=True, scheduler=True)
        self.asked = asked

    def configure_optimizers(self) -> Any:
        [optimizer], [scheduler] = super().configure_optimizers()
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        if self.trainer.global_step == self.asked:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)


def fit(folder: Path, asked: int | None = None, resumes: bool = False) -> dict[str, Any]:
    pl.seed_everything(7, verbose=False)
    model = Job(asked)
    strategy = LocalSGDStrategy(period=PERIOD, partition="defdp", timeout_s=TIMEOUT_S, outer_optimizer="nesterov")
    savers: list[Any] = [OnExceptionCheckpoint(folder, "left")]
    savers += [ModelCheckpoint(folder, "model", save_on_exception=True)]
    run = trainer(strategy, 1, folder, max_epochs=EPOCHS, callbacks=savers, enable_checkpointing=True)
    status = None
    try:
        run.fit(
            model,
            DataLoader(dataset(), 2, shuffle=True),
            val_loader(),
            ckpt_path=folder / "left.ckpt" if resumes else None,
        )
    except SystemExit as error:
        status = error.code
    return {"status": status, "steps": run.global_step, "seen": model.seen, "weights": model.weights()}


def train(addresses: list[str], folder: Path) -> list[dict[str, Any]]:
    """Trains undisturbed; until all are asked to leave; from there; and is asked while it waits for a third job."""
    rank = int(os.environ["RANK"])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    found = []
    for address, settings in zip(addresses[:3], ({}, {"asked": ASKED}, {"resumes": True}), strict=True):
        become_replica(address, rank, 2)
        found.append(fit(folder / str(rank), **settings))  # type: ignore[arg-type]
    become_replica(addresses[3], rank, 3)
    when_called(Sections, "_wait_for_more", 0, lambda: os.kill(os.getpid(), signal.SIGTERM))
    found.append(fit(folder / f"{rank} waits"))
    return found


def test_all_leave_and_resume_as_if_nothing_had_happened(tmp_path: Path) -> None:
    with ExitStack() as stack:
        addresses = [stack.enter_context(lighthouse()) for _ in range(4)]
        outcomes = on_ranks(train, 2, addresses, tmp_path, init=False)
    for whole, left, resumed, waiting in outcomes:
        assert (waiting["status"], waiting["steps"]) == (143, 0)
        assert (whole["status"], left["status"], resumed["status"]) == (None, 143, None)
        assert (left["steps"], resumed["steps"]) == (LEAVE, whole["steps"])
        assert left["seen"] + resumed["seen"] == whole["seen"]
        assert torch.equal(resumed["weights"], whole["weights"])
