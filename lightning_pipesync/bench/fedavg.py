"""Federated averaging (McMahan et al.), a baseline of SelSync's paper (Section II-B)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from lightning_pipesync.bench.tasks import Task
from lightning_pipesync.bench.trainings import OverTransport
from lightning_pipesync.core.buckets import Bucket


@dataclass(frozen=True)
class FedAvgConfig:
    """Settings of FedAvg."""

    C: float = 1.0
    """The share of the ranks whose weights are averaged; all ranks get the average."""

    E: float = 0.25
    """The synchronization factor: the part of an epoch between two averages."""

    def __post_init__(self) -> None:
        for name, value in (("C", self.C), ("E", self.E)):
            if not 0 < value <= 1:
                raise ValueError(f"{name} of FedAvg must be in (0, 1], got {value!r}.")


class FedAvg(OverTransport):
    """Local steps, and a periodic average of some ranks' weights for all ranks."""

    def __init__(self, task: Task, config: FedAvgConfig) -> None:
        super().__init__(task)
        self._steps = self._num_averages = 0
        world_size = self._transport.world_size
        self._interval = max(1, round(config.E * self.steps_per_epoch))
        self._num_chosen = max(1, round(config.C * world_size))
        self._choice = random.Random(0)  # the same on all ranks

    def update(self) -> None:
        self._clip()
        self.optimizer.step()
        self._steps += 1
        if self._steps % self._interval == 0:
            self._average()

    @contextmanager
    def consolidated(self) -> Iterator[nn.Module]:
        """Yields the module with the last average."""
        own = Bucket(self._parameters)
        own.pack(self._parameters)
        self._weights.unpack(self._parameters)
        yield self.module
        own.unpack(self._parameters)

    @property
    def lssr(self) -> float | None:
        return 1 - self._num_averages / self._steps if self._steps else 0.0

    @torch.no_grad()
    def _average(self) -> None:
        chosen = self._choice.sample(range(self._transport.world_size), self._num_chosen)
        self._weights.pack(self._parameters)
        if self._transport.rank not in chosen:
            self._weights.flat.zero_()
        self._transport.all_reduce(self._weights.flat).wait()
        self._weights.flat.div_(self._num_chosen)
        self._weights.unpack(self._parameters)
        self._num_averages += 1
