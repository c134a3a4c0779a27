"""Ranks of a Trainer that train on different numbers of batches."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler

from lightning_pipesync.core.private_names import with_attributes
from lightning_pipesync.data.loaders import sampler_of
from lightning_pipesync.data.order import with_work_queue
from lightning_pipesync.data.work_queue import Ask, WorkQueueBatches

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class UnevenBatches:
    """A Trainer's loader that takes its batches from the work queue; schedulers and ``max_steps`` follow all ranks."""

    def __init__(self, world_size: int, ask: Ask) -> None:
        self._world_size, self._ask = world_size, ask
        self._batches: WorkQueueBatches | None = None
        self._num_loaders = 0
        self._num_stepped: dict[int, int] = {}  # by scheduler
        self._max_batches: int | None = None

    def with_work_queue(self, loader: DataLoader[Any], order: DistributedSampler[Any] | None) -> DataLoader[Any]:
        """Returns a loader that takes its batches from the work queue; ``order`` is None if it is the user's own."""
        self._num_loaders += 1
        loader = with_work_queue(loader, order, self._ask, self._num_loaders, to_each_of=self._world_size)
        self._batches = sampler_of(loader)
        self._batches.max_batches = self._max_batches
        return loader

    def limited(self, trainer: Trainer) -> AbstractContextManager[None]:
        """Makes ``max_steps`` count the steps of an average rank, however many steps this one takes.

        All ranks together get as many batches as DDP's would in ``max_steps`` steps. If they are fewer in the last
        epoch than there are ranks, that epoch is left out.
        """
        loop = trainer.fit_loop.epoch_loop
        if loop.max_steps != -1:
            self._max_batches = loop.max_steps * self._world_size * trainer.accumulate_grad_batches
        return with_attributes(loop, max_steps=-1)

    @property
    def are_used_up(self) -> bool:
        """Whether as many batches have been handed out as ``max_steps`` allows, at the end of an epoch."""
        if self._batches is None or self._max_batches is None:
            return False
        return self._max_batches - self._batches.num_taken < self._world_size

    def pace_schedulers(self, module: LightningModule) -> AbstractContextManager[None]:
        """Returns a context manager in which schedulers that count steps go to where an average rank is.

        Those that wait for a metric stay as they are.
        """
        step = module.lr_scheduler_step

        def to_position(scheduler: Any, metric: Any) -> None:
            trainer = module.trainer
            config = next(config for config in trainer.lr_scheduler_configs if config.scheduler is scheduler)
            if config.interval != "step" or isinstance(scheduler, ReduceLROnPlateau) or self._batches is None:
                step(scheduler, metric)
                return
            batches_per_step = self._world_size * trainer.accumulate_grad_batches * config.frequency
            position = self._batches.num_taken // batches_per_step
            done = self._num_stepped.get(id(scheduler), getattr(scheduler, "last_epoch", position - 1))
            for _ in range(done, position):
                step(scheduler, metric)
            self._num_stepped[id(scheduler)] = max(done, position)

        return with_attributes(module, lr_scheduler_step=to_position)
