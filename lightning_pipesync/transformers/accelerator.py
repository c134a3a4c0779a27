"""The Accelerator of transformers' Trainer, and its training loader in jobs that come and go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from lightning_pipesync.accelerate.accelerator import PipeSyncAccelerator
from lightning_pipesync.accelerate.elastic import ElasticLoader
from lightning_pipesync.accelerate.sharding import shards_by_fsdp2
from lightning_pipesync.data import TrainLoader
from lightning_pipesync.data.loaders import num_batches
from lightning_pipesync.training.module import SyncedModule
from lightning_pipesync.training.session import contains


class StepsLoader(ElasticLoader):
    """A training loader whose epochs are the Trainer's: of a fixed number of batches.

    The Trainer counts steps before the training, for ``max_steps`` and schedulers. So its epoch has as many batches as
    the data with the replicas with which training begins. With fewer or more of them, the data go on from one of their
    epochs to the next within it.

    Args:
        loader: what counts epochs and batches of the data.
        join: joins the other replicas, once.
    """

    def __init__(self, loader: TrainLoader, join: Callable[[], None]) -> None:
        super().__init__(loader, join)
        self._length = num_batches(loader)
        self._has_begun, self._skipped = False, 0

    def __len__(self) -> int:
        """Returns the number of batches of an epoch of the Trainer; a TypeError, if the data set does not know it."""
        return len(self.loader) if self._length is None else self._length

    def _begin_epoch(self) -> None:
        self._has_begun = True
        if self.loader.num_batches and self._is_last():
            self.loader.set_epoch(self.loader.epoch + 1)
        else:
            self.loader.load_state_dict(self.loader.state_dict())  # goes on where it is

    def _batches(self) -> Iterator[Any]:
        """Iterates over the batches from here on; the Trainer stops at the end of its epoch."""
        is_empty = False  # what is left of an epoch may be
        while not is_empty:
            is_empty = self.loader.num_batches == 0
            for batch in self.loader:
                is_empty = False
                yield batch

    def skip_first_batches(self, num_batches: int) -> StepsLoader:
        """Has the epoch that is set next begin after so many batches, unless the place in the data is known."""
        self._skipped = num_batches
        return self

    def set_epoch(self, epoch: int) -> None:
        """Begins with this epoch, if nothing has told the place in the data: no checkpoint, and no other replica."""
        if not self._has_begun and (self.loader.epoch, self.loader.num_batches) == (0, 0):
            self.loader.load_state_dict({"epoch": epoch, "num_batches": self._skipped})


class TrainersAccelerator(PipeSyncAccelerator):
    """A PipeSyncAccelerator that returns a model that it shards without a wrapper: it becomes ``trainer.model``.

    Evaluation mode does not consolidate its weights, which the Trainer does itself.
    """

    elastic_loader_type = StepsLoader
    warns_of_own_weights = False  # with label smoothing the Trainer unwraps its model in each step, to read its class

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unwrapped: list[SyncedModule] = []  # which their sessions do not keep

    def _wrapped(self, model: nn.Module) -> nn.Module:
        wrapper = super()._wrapped(model)
        if not isinstance(wrapper, SyncedModule) or not shards_by_fsdp2(self):
            return wrapper
        if not contains(self._unwrapped, wrapper):
            self._unwrapped.append(wrapper)

            def resume(*_: Any) -> None:
                if wrapper.method is not None and wrapper.module.training and torch.is_grad_enabled():
                    wrapper.begin_to_train()

            wrapper.module.register_forward_pre_hook(resume, prepend=True)  # before FSDP2 gathers the weights
        return wrapper.module
