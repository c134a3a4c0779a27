"""Three jobs of which one is killed and comes back, in a plain loop and in a Trainer: bit for bit as simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_pipesync import LocalSGDStrategy
from tests.references.elastic_data import Data, seen
from tests.support.harness import DIED
from tests.support.lightning_models import SAMPLES, Classifier, dataset, trainer, val_loader
from tests.support.replica_jobs import (
    DIES,
    TIMEOUT_S,
    WAITS,
    Job,
    at_step,
    dies_and_comes_back,
    launch_replicas,
    run,
)

EPOCHS = 2


def test_in_a_plain_loop(tmp_path: Path) -> None:
    """Of DiLoCo: a part of the outer state is lost."""
    run({"comes back": Job(fates={1: at_step(4)}, lost={1: 6}, comes=(1,))}, tmp_path)


class Recorder(Classifier):
    """Notes where it is before each step, and may die then."""

    def __init__(self, before_step: Any, directory: Path | None) -> None:
        super().__init__(scheduler=True)
        self.before_step, self.comes_to = before_step, directory
        self.where: list[tuple[int, int, int, float]] = []

    def configure_optimizers(self) -> Any:
        [optimizer], [scheduler] = super().configure_optimizers()
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def on_fit_start(self) -> None:
        if self.comes_to is not None:
            (self.comes_to / "started").touch()  # it is alive, so that the others wait for it in their next round

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        step = self.trainer.global_step
        self.before_step(step)
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.where.append((self.trainer.current_epoch, batch_idx, step, rate))
        return super().training_step(batch, batch_idx)


def train(rank: int, directory: Path) -> dict[str, Any]:
    """Trains as the job ``rank``; the last one is job 1, when it comes back, and has other weights before."""
    _, before_step = dies_and_comes_back(rank, victim=1, last=3, directory=directory)
    pl.seed_everything(7, verbose=False)
    model = Recorder(before_step, directory if rank == 3 else None)
    torch.nn.init.normal_(model.model[2].weight, std=1 + rank)
    strategy = LocalSGDStrategy(period=2, partition="defdp", timeout_s=TIMEOUT_S)
    run = trainer(strategy, 1, directory / str(rank), max_epochs=EPOCHS)
    run.fit(model, DataLoader(dataset(), 2, shuffle=True), val_loader())
    return {"seen": model.seen, "where": model.where, "steps": run.global_step, "validated_with": model.validated_with}


def test_in_a_trainer(tmp_path: Path) -> None:
    """Each sample once, but for what the lost one had: its epochs, steps and learning rates are those of the others."""
    of_0, of_1, of_2, of_1_again = launch_replicas(train, 4, tmp_path, num_replicas=3, may_die=(1,))
    assert of_1 == DIED
    lost, came = DIES + 1, of_1_again["where"][0][2]
    assert came > WAITS
    expected = seen(Data(SAMPLES, 2), {0: "012", lost: "02", came: "012"}, EPOCHS)
    assert of_0["seen"] == [batch for _, batch in expected["0"]]
    assert of_2["seen"] == [batch for _, batch in expected["2"]]
    assert of_1_again["seen"] == [batch for _, batch in expected["1"]][lost:]
    agreed = of_1_again["validated_with"]
    assert agreed
    for outcome in (of_0, of_2):
        assert outcome["where"][came:] == of_1_again["where"]
        assert outcome["steps"] == of_1_again["steps"]
        for one, other in zip(outcome["validated_with"][-len(agreed) :], agreed, strict=True):
            assert torch.equal(one, other)
