"""A candidate of the benchmark of a training step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, Optimizer

from lightning_pipesync.lab.bench.models import BenchModel

#: Every candidate trains with SGD, learning rate and momentum.
LEARNING_RATE, MOMENTUM = 1e-3, 0.9


class Candidate(ABC):
    """A way to train a model, the same on all ranks.

    Attributes:
        name: the name in tables.
        model: the model that it trains.
        limit: the property of :class:`StepCost` that bounds the time of its step from below.
        compression: the ratio of the size of the gradient to its size on the wire.
        segments: the number of segments of an all-reduce that runs under the next step; None: there is none.
        period: the number of steps after which what a step does repeats: take whole periods as a measurement.
    """

    limit = "compute"
    compression = 1.0
    segments: int | None = None
    period = 1

    def __init__(self, name: str, model: BenchModel) -> None:
        self.name, self.model = name, model
        self.batch = model.make_batch(dist.get_rank())

    @abstractmethod
    def step(self) -> None:
        """Takes one training step."""

    def prepare(self) -> dict[str, Any] | None:
        """Runs before all measurements; returns the result of a search, if there is one."""
        return None

    def begin(self) -> None:
        """Takes steps until the operations in flight are those of the steady state."""
        self.step()

    def drain(self) -> None:  # noqa: B027 - most have nothing in flight between two steps
        """Waits for the operations in flight after a step."""

    def close(self) -> None:  # noqa: B027
        """Ends threads and process groups."""


def sgd(parameters: Iterable[Tensor]) -> Optimizer:
    return SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM)
