"""Trainers as jobs that leave and resume, end together, or lose one that has several ranks."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_pipesync import LocalSGDStrategy
from lightning_pipesync.methods.replicas.rounds import QuorumRounds
from tests.references.elastic_data import Data, seen
from tests.support.harness import DIED, assert_raised, launch, on_ranks, raised
from tests.support.lightning_models import SAMPLES, Classifier, dataset, trainer, val_loader
from tests.support.lost_ranks import die
from tests.support.replica_jobs import (
    DIES,
    TIMEOUT_S,
    become_replica,
    launch_replicas,
    leave_job,
    lighthouse,
    when_called,
)


def ask_to_leave() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class Leaver(Classifier):
    """Is asked to leave in a step, if there is one."""

    def __init__(self, asked: int | None) -> None:
        super().__init__(batch_norm=True, scheduler=True)
        self.asked = asked

    def configure_optimizers(self) -> Any:
        [optimizer], [scheduler] = super().configure_optimizers()
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        if self.trainer.global_step == self.asked:
            ask_to_leave()
        return super().training_step(batch, batch_idx)


def fit(folder: Path, asked: int | None = None, resumes: bool = False) -> dict[str, Any]:
    pl.seed_everything(7, verbose=False)
    model, status = Leaver(asked), None
    strategy = LocalSGDStrategy(period=4, partition="defdp", timeout_s=TIMEOUT_S, outer_optimizer="nesterov")
    savers: list[Any] = [OnExceptionCheckpoint(folder, "left")]
    savers += [ModelCheckpoint(folder, "model", save_on_exception=True)]
    run = trainer(strategy, 1, folder, max_epochs=2, callbacks=savers, enable_checkpointing=True)
    checkpoint = folder / "left.ckpt" if resumes else None
    try:
        run.fit(model, DataLoader(dataset(), 2, shuffle=True), val_loader(), ckpt_path=checkpoint)
    except SystemExit as error:
        status = error.code
    return {"status": status, "steps": run.global_step, "seen": model.seen, "weights": model.weights()}


def leave_and_resume(addresses: list[str], folder: Path) -> list[dict[str, Any]]:
    """Trains undisturbed; until all are asked to leave; from there; and is asked while it waits for a third job."""
    rank, found = leave_job(), []
    for address, settings in zip(addresses[:3], ({}, {"asked": 9}, {"resumes": True}), strict=True):
        become_replica(address, rank, 2)
        found.append(fit(folder / str(rank), **settings))  # type: ignore[arg-type]
    become_replica(addresses[3], rank, 3)
    when_called(QuorumRounds, "_wait_for_more", 0, ask_to_leave)
    found.append(fit(folder / f"{rank} waits"))
    return found


def test_all_leave_and_resume_as_if_nothing_had_happened(tmp_path: Path) -> None:
    with ExitStack() as stack:
        addresses = [stack.enter_context(lighthouse()) for _ in range(4)]
        outcomes = launch(leave_and_resume, 2, addresses, tmp_path, init=False)
    for whole, left, resumed, waiting in outcomes:
        assert (waiting["status"], waiting["steps"]) == (143, 0)
        assert (whole["status"], left["status"], resumed["status"]) == (None, 143, None)
        assert (left["steps"], resumed["steps"]) == (12, whole["steps"])
        assert left["seen"] + resumed["seen"] == whole["seen"]
        assert torch.equal(resumed["weights"], whole["weights"])


class ShardedJob(Classifier):
    """A job of two ranks, each with a shard of the model; replica 0 dies in a step."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def configure_model(self) -> None:
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        if self.number == 0 and self.trainer.global_step == DIES:
            die()
        return super().training_step(batch, batch_idx)


def train_sharded(number: int, directory: Path) -> list[list[int]]:
    pl.seed_everything(7, verbose=False)
    model = ShardedJob(number)
    strategy = LocalSGDStrategy(period=2, partition="defdp", timeout_s=TIMEOUT_S, ranks_per_replica=2)
    trainer(strategy, 2, directory / str(number), max_epochs=1).fit(model, DataLoader(dataset(), 2, shuffle=True))
    return model.seen


def test_trainers_of_several_ranks_divide_the_data_among_all_ranks_that_are_left(tmp_path: Path) -> None:
    outcomes = launch_replicas(train_sharded, 2, tmp_path, ranks_per_replica=2, may_die=(0, 1))
    assert outcomes[:2] == [DIED, DIED]
    expected = seen(Data(SAMPLES, 2), {0: "0123", DIES + 1: "23"}, 1)
    for rank in (2, 3):
        assert outcomes[rank] == [batch for _, batch in expected[str(rank)]]


def average_each_step(number: int, directory: Path) -> tuple[str, str] | None:
    run = trainer(LocalSGDStrategy(period=2), 1, directory / str(number), callbacks=[EMAWeightAveraging()])
    return raised(lambda: run.fit(Classifier(), DataLoader(dataset(), 4), val_loader()))


def test_a_running_average_of_each_job_is_refused(tmp_path: Path) -> None:
    [outcome] = launch_replicas(average_each_step, 1, tmp_path)
    assert_raised(outcome, "ValueError", "lighthouse='127.0.0.1:", "EMAWeightAveraging", "leave lighthouse out")


def train_an_epoch(_: int, directory: Path, period: int, devices: int = 1) -> tuple[Tensor, Tensor]:
    """Trains for 8 steps; returns the weights of the validation, and those at the end."""
    pl.seed_everything(7, verbose=False)
    model = Classifier()
    strategy = LocalSGDStrategy(period=period, partition="defdp", timeout_s=TIMEOUT_S)
    run = trainer(strategy, devices, directory, max_epochs=1)
    run.fit(model, DataLoader(dataset(), 4, shuffle=True), val_loader())
    assert run.global_step == 8
    return model.validated_with[0], model.weights()


@pytest.mark.parametrize("period", [5, 100], ids=["within a round", "before the first round"])
def test_trainers_end_with_an_average(period: int, tmp_path: Path) -> None:
    """Of the steps since the last round, too, though the validation was with the weights of that round."""
    of_jobs = launch_replicas(train_an_epoch, 2, tmp_path, period)
    of_one_job = on_ranks(train_an_epoch, 2, 0, tmp_path, period, 2, init=False)
    for (validated, last), (_, of_ranks) in zip(of_jobs, of_one_job, strict=True):
        assert torch.equal(last, of_ranks)
        assert not torch.equal(last, validated)
