"""Trainers as jobs of which one dies within an epoch, and comes back: each sample once, but for what it has lost."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_pipesync import LocalSGDStrategy
from tests.references.elastic_data import Data, seen
from tests.support.harness import DIED, assert_raised, on_ranks, raised
from tests.support.lightning_models import SAMPLES, Classifier, dataset, trainer, val_loader
from tests.support.lost_ranks import die
from tests.support.replica_jobs import TIMEOUT_S, launch_replicas, wait_for

PERIOD, EPOCHS = 2, 3
#: The step in which one dies, and that in which the others wait until it has started again.
DIES, WAITS = 3, 6


class Job(Classifier):
    """One of the jobs; ``number`` 1 dies once, and its samples until then are lost with it."""

    def __init__(self, number: int, comes_back: bool, directory: Path) -> None:
        super().__init__(scheduler=True)
        self.number, self.comes_back, self.directory = number, comes_back, directory
        self.where: list[tuple[int, int, int, float]] = []

    def configure_optimizers(self) -> Any:
        [optimizer], [scheduler] = super().configure_optimizers()
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def on_fit_start(self) -> None:
        if self.comes_back:
            (self.directory / "started").touch()  # it is alive, so that the others wait for it in their next round

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        step = self.trainer.global_step
        if self.number == 1 and step == DIES and not self.comes_back:
            die()
        if step == WAITS:  # they have had a round without it
            (self.directory / "going on").touch()
            wait_for(self.directory / "started")
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.where.append((self.trainer.current_epoch, batch_idx, step, rate))
        return super().training_step(batch, batch_idx)


def train(rank: int, directory: Path) -> dict[str, Any]:
    """Trains as the job ``rank``; the last one is job 1, when it comes back."""
    number = rank
    if rank == 3:
        number = 1
        os.environ["PIPESYNC_REPLICA"] = "1"
        wait_for(directory / "going on")
    pl.seed_everything(7, verbose=False)
    model = Job(number, rank == 3, directory)
    torch.nn.init.normal_(model.model[2].weight, std=1 + rank)  # a job that comes has other weights before
    strategy = LocalSGDStrategy(period=PERIOD, partition="defdp", timeout_s=TIMEOUT_S)
    run = trainer(strategy, 1, directory / str(rank), max_epochs=EPOCHS)
    run.fit(model, DataLoader(dataset(), 2, shuffle=True), val_loader())
    return {"seen": model.seen, "where": model.where, "steps": run.global_step, "validated_with": model.validated_with}


def test_a_trainer_dies_and_comes_back(tmp_path: Path) -> None:
    of_0, of_1, of_2, of_1_again = launch_replicas(train, 4, tmp_path, num_replicas=3, may_die=(1,))
    assert of_1 == DIED
    lost, came = DIES + 1, of_1_again["where"][0][2]
    assert came > WAITS
    expected = seen(Data(SAMPLES, 2), {0: "012", lost: "02", came: "012"}, EPOCHS)
    assert of_0["seen"] == [batch for _, batch in expected["0"]]
    assert of_2["seen"] == [batch for _, batch in expected["2"]]
    assert of_1_again["seen"] == [batch for _, batch in expected["1"]][lost:]
    for outcome in (of_0, of_2):
        assert outcome["where"][came:] == of_1_again["where"]
        assert outcome["steps"] == of_1_again["steps"]
    agreed = of_1_again["validated_with"]
    assert agreed
    for one, other in zip(of_0["validated_with"][-len(agreed) :], agreed, strict=True):
        assert torch.equal(one, other)


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

    def validation_step(self, *args: Any) -> None:
        """Validates nothing."""


def train_sharded(number: int, directory: Path) -> list[list[int]]:
    os.environ["LOCAL_RANK"] = os.environ["RANK"]  # in this job
    pl.seed_everything(7, verbose=False)
    model = ShardedJob(number)
    strategy = LocalSGDStrategy(period=PERIOD, partition="defdp", timeout_s=TIMEOUT_S, ranks_per_replica=2)
    trainer(strategy, 2, directory / str(number), max_epochs=1).fit(model, DataLoader(dataset(), 2, shuffle=True))
    return model.seen


def test_trainers_of_several_ranks_divide_the_data_among_all_ranks_that_are_left(tmp_path: Path) -> None:
    outcomes = launch_replicas(train_sharded, 3, tmp_path, ranks_per_replica=2, may_die=(0, 1))
    assert outcomes[:2] == [DIED, DIED]
    expected = seen(Data(SAMPLES, 2), {0: "012345", DIES + 1: "2345"}, 1)
    for rank in range(2, 6):
        assert outcomes[rank] == [batch for _, batch in expected[str(rank)]]


def average_each_step(number: int, directory: Path) -> tuple[str, str] | None:
    run = trainer(LocalSGDStrategy(period=PERIOD), 1, directory / str(number), callbacks=[EMAWeightAveraging()])
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
