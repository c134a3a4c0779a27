"""Trainings of a task on all ranks, with the methods of this package and the papers' baselines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.data import LabelSkewedSampler
from lightning_pipesync.data.loaders import with_seed_of_its_own
from lightning_pipesync.data.train_loader import TrainLoader
from lightning_pipesync.lab.bench.candidates import in_ddp
from lightning_pipesync.lab.bench.passes import Passes
from lightning_pipesync.lab.bench.tasks import Task
from lightning_pipesync.methods.sync_method import SyncMethod


class Training(ABC):
    """A training of a task, the same on all ranks.

    Attributes:
        module: the module that is trained.
        optimizer: the optimizer, whose learning rate the task's schedule changes.
        passes: runs the forward and backward passes. May be set before the first step.

    Args:
        task: the task.
    """

    def __init__(self, task: Task) -> None:
        self.passes = Passes()
        self.task, self.module = task, task.build_module()
        self.optimizer = task.optimizer(self.module)

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps in which each rank uses its share of the training data once."""
        return -(-len(self._sampler(0)) // self.task.batch_size)

    def loader(self, seed: int) -> TrainLoader:
        """Returns this rank's training loader, whose iterations are successive epochs; a collective call."""
        return TrainLoader(with_seed_of_its_own(self._in_order(seed)), finish=lambda batch: batch)

    def step(self, batch: Any) -> None:
        """Takes one training step."""
        self.module.zero_grad()
        self.passes.run(lambda: self.task.loss(self.module, batch))
        self.update()

    @abstractmethod
    def update(self) -> None:
        """Clips the gradient and updates the weights."""

    @contextmanager
    def consolidated(self) -> Iterator[nn.Module]:
        """Yields the module with the consolidated weights; a collective call."""
        yield self.module

    @property
    @abstractmethod
    def mib_sent(self) -> float:
        """MiB that this rank has sent so far."""

    @property
    def lssr(self) -> float | None:
        """The share of local steps (SelSync, Eq. 4); None if it is not defined."""
        return 0.0

    def close(self) -> None:  # noqa: B027 - most have nothing running
        """Ends threads and process groups."""

    def _in_order(self, seed: int) -> DataLoader[Any]:
        return DataLoader(self.task.train_set, self.task.batch_size, sampler=self._sampler(seed))

    def _sampler(self, seed: int) -> DistributedSampler[Any]:
        if self.task.labels is None or self.task.labels_per_worker is None:
            return DistributedSampler(self.task.train_set, seed=seed)
        return LabelSkewedSampler(self.task.labels, self.task.labels_per_worker, seed=seed)

    def _clip(self) -> None:
        if self.task.max_norm is not None:
            nn.utils.clip_grad_norm_(self.module.parameters(), self.task.max_norm)


@dataclass(frozen=True)
class DDPConfig:
    """Settings of DDP."""

    bucket_mb: float = 25.0
    """MiB of a bucket of gradients."""

    def __post_init__(self) -> None:
        if not self.bucket_mb > 0:
            raise ValueError(f"bucket_mb must be a positive number of MiB, got {self.bucket_mb!r}.")


class WithDDP(Training):
    """``DistributedDataParallel``: bulk-synchronous training (BSP)."""

    def __init__(self, task: Task, config: DDPConfig) -> None:
        super().__init__(task)
        self._alone = self.module
        self.module = in_ddp(self.module, config.bucket_mb)
        self._num_bytes = sum(p.numel() * p.element_size() for p in self.module.parameters())
        self._steps = 0

    def update(self) -> None:
        self._clip()
        self.optimizer.step()
        self._steps += 1

    @contextmanager
    def consolidated(self) -> Iterator[nn.Module]:
        yield self._alone  # the wrapper would exchange buffers

    @property
    def mib_sent(self) -> float:
        """The least MiB of an all-reduce, those of a ring, of every gradient: DDP does not count."""
        world_size = dist.get_world_size()
        return 2 * (world_size - 1) / world_size * self._num_bytes * self._steps / MIB


@dataclass(frozen=True)
class AloneConfig:
    """Settings of training without communication: there are none."""


class Alone(Training):
    """Every rank trains by itself. Its step is the shortest there can be: the limit of all methods."""

    def __init__(self, task: Task, config: AloneConfig) -> None:
        super().__init__(task)

    def update(self) -> None:
        self._clip()
        self.optimizer.step()

    @property
    def mib_sent(self) -> float:
        return 0.0

    @property
    def lssr(self) -> float | None:
        return 1.0


class WithMethod(Training):
    """A training with a method of this package. Gradients that are under way at the end are dropped."""

    def __init__(self, task: Task, config: Any, method: type[SyncMethod]) -> None:
        super().__init__(task)
        self.method = method(self.module, self.optimizer, config)

    def update(self) -> None:
        if self.task.max_norm is not None:
            self.method.clip(self.task.max_norm)
        self.method.step()

    @contextmanager
    def consolidated(self) -> Iterator[nn.Module]:
        self.method.flush()
        yield self.module
        self.method.resume()

    @property
    def mib_sent(self) -> float:
        return self.method.metrics()["mib_sent"]

    @property
    def lssr(self) -> float | None:
        return self.method.metrics().get("lssr")

    def close(self) -> None:
        self.method.detach()


class WithReplicas(WithMethod):
    """A method whose ranks train replicas of their own, with its order of the data and its data injection."""

    def loader(self, seed: int) -> TrainLoader:
        return self.method.prepare_train_loader(self._in_order(seed))
