"""Records a training while it runs, for the table and the picture."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import lightning as L
from rich.progress import Progress, TaskID

from lightning_pipesync import SelSyncStrategy

MIB = 2**20


@dataclass
class Run:
    """One training.

    Attributes:
        name: the same for runs that differ only in the seed.
        seed: of the initial weights and the order of the data.
        delta: SelSync's threshold; None for DDP.
        seconds: since training began, at each validation.
        accuracies: on the test set, at each validation.
        mib_sent: by rank 0 so far, at each validation.
        mib_for_validation: the part of it that averaged the replicas for validations.
        relative_changes: of the gradient, at each step: the largest over all ranks, None where it is undefined.
        synchronized: whether the step was synchronized, at each step.
        lssr: share of the steps that stayed local.
    """

    name: str
    seed: int
    delta: float | None
    seconds: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    mib_sent: list[float] = field(default_factory=list)
    mib_for_validation: float = 0.0
    relative_changes: list[float | None] = field(default_factory=list)
    synchronized: list[bool] = field(default_factory=list)
    lssr: float = 0.0

    @property
    def steps(self) -> int:
        return len(self.synchronized)

    @property
    def accuracy(self) -> float:
        """The mean over the last five validations, since a single one depends on its last few steps."""
        return fmean(self.accuracies[-5:])


class Recorder(L.Callback):
    """Fills in a :class:`Run`, and shows its progress on a bar."""

    def __init__(self, run: Run, progress: Progress, task: TaskID) -> None:
        self.run, self.progress, self.task = run, progress, task
        self._changes: list[float] = []  # on this rank

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            self.progress.start()
        self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if isinstance(trainer.strategy, SelSyncStrategy):
            # This is how to inspect a run. For a log, the strategy's metrics (selsync/lssr, ...) suffice.
            method = trainer.strategy.method
            self._changes.append(method.last.relative_change)
            self.run.synchronized.append(method.last.synchronized)
            self.run.lssr = method.lssr
        else:
            self.run.synchronized.append(True)
        self._mib_after_step = mib_sent(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        accuracy = trainer.callback_metrics["test_accuracy"].item()
        self.run.seconds.append(time.perf_counter() - self._start)
        self.run.accuracies.append(accuracy)
        self.run.mib_sent.append(mib_sent(trainer))
        self.run.mib_for_validation += self.run.mib_sent[-1] - self._mib_after_step
        self.progress.update(self.task, advance=1, status=f"seed {self.run.seed}: {accuracy:.1%}")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if isinstance(trainer.strategy, SelSyncStrategy):
            changes = trainer.strategy.method.transport.gather_objects(self._changes)
            largest = map(max, zip(*changes, strict=True))
            self.run.relative_changes = [change if math.isfinite(change) else None for change in largest]


def mib_sent(trainer: L.Trainer) -> float:
    """Returns the MiB that this rank has sent for training."""
    method = getattr(trainer.strategy, "method", None)
    if method is not None:
        return method.metrics()["mib_sent"]
    # DDP does not count its traffic. A ring all-reduce of every gradient sends the minimum:
    gradient = sum(p.numel() * p.element_size() for p in trainer.lightning_module.parameters() if p.requires_grad)
    return 2 * (trainer.world_size - 1) / trainer.world_size * gradient * trainer.global_step / MIB
