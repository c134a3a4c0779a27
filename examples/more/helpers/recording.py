"""Records a training while it runs, for the table and the picture."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import lightning as L

MIB = 2**20


@dataclass
class Run:
    """One training.

    Attributes:
        strategy: the name of the Trainer's strategy.
        seed: of the initial weights and the order of the data.
        seconds: since training began, at each validation.
        accuracies: on the test set, at each validation.
        steps: of the optimizer, in all.
        mib_sent: by rank 0, in steps.
    """

    strategy: str
    seed: int
    seconds: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    steps: int = 0
    mib_sent: float = 0.0

    @property
    def accuracy(self) -> float:
        """The mean over the last three validations, since a single one depends on its last few steps."""
        return fmean(self.accuracies[-3:])


class Recorder(L.Callback):
    """Fills in a :class:`Run`, and prints its progress."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._start = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        run = self.run
        run.seconds.append(time.perf_counter() - self._start)
        run.accuracies.append(trainer.callback_metrics["test_accuracy"].item())
        if trainer.is_global_zero:
            print(
                f"{run.strategy:<12}  seed {run.seed}  epoch {len(run.seconds):2} of {trainer.max_epochs}"
                f"  {run.seconds[-1]:5.1f} s  test accuracy {run.accuracies[-1]:.1%}",
                flush=True,
            )

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.run.steps, self.run.mib_sent = trainer.global_step, mib_sent(trainer)


def mib_sent(trainer: L.Trainer) -> float:
    """Returns the MiB that this rank has sent in steps."""
    method: Any = getattr(trainer.strategy, "method", None)
    if method is not None:
        return float(method.metrics()["mib_sent"])
    # DDP does not count its traffic. A ring all-reduce of every gradient sends the minimum:
    gradient = sum(p.numel() * p.element_size() for p in trainer.lightning_module.parameters() if p.requires_grad)
    return 2 * (trainer.world_size - 1) / trainer.world_size * gradient * trainer.global_step / MIB
