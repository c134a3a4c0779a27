"""An Accelerator that shards models by FSDP2, and leaves their replicas to a method."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.scheduler import AcceleratedScheduler
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_pipesync.accelerate.plugin import PipeSyncPlugin
from lightning_pipesync.accelerate.private import add_prepared_model, mark_prepared
from lightning_pipesync.accelerate.saving import SavingAccelerator
from lightning_pipesync.accelerate.sharding import replicas_of, shards_by_fsdp2
from lightning_pipesync.core.dtensors import is_sharded
from lightning_pipesync.training.module import SyncedModule


class ShardingAccelerator(SavingAccelerator):
    """An Accelerator whose ``prepare`` shards a model with its optimizers, if there is an ``fsdp_plugin``."""

    @property
    def _synchronizes(self) -> bool:
        """Whether a method synchronizes what is prepared."""
        if self.pipesync is None:
            return False
        if self.pipesync.config.num_jobs is not None:
            return True
        return self.num_processes > 1 and (not shards_by_fsdp2(self) or replicas_of(self) is not None)

    @property
    def _synced(self) -> PipeSyncPlugin | None:
        """The plugin, if its method synchronizes what a loop computes; None: one process, or a pipeline."""
        return self.pipesync if self._synchronizes and self._pipelined is None else None

    @property
    def _pipelined(self) -> PipeSyncPlugin | None:
        """The plugin, if its method is a pipeline."""
        return self.pipesync if self.pipesync is not None and self.pipesync.method_type.makes_passes else None

    @override
    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        if not self._synchronizes or not shards_by_fsdp2(self):
            return super().prepare(*args, device_placement=device_placement)
        given = [one.module if isinstance(one, SyncedModule) else one for one in args]
        if any(isinstance(one, nn.Module) and is_sharded(one) for one in given):
            prepared = self._prepared_again(given)
        else:
            result = super().prepare(*given, device_placement=device_placement)
            prepared = list(result) if len(given) > 1 else [result]
        wrapped = tuple(self._wrapped(one) if isinstance(one, nn.Module) else one for one in prepared)
        return wrapped if len(wrapped) > 1 else wrapped[0]

    @contextmanager
    @override
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Accumulates gradients without communication; those of a sharded model are whole on each rank meanwhile."""
        inner = model.module if shards_by_fsdp2(self) and isinstance(model, SyncedModule) else model
        with super().no_sync(inner):
            yield

    def _prepared_again(self, given: list[Any]) -> list[Any]:
        """Prepares what belongs to a model that is sharded already.

        Accelerate would look up the parameters of its optimizers by their addresses, and all empty shards share one.
        """
        prepared = [self.prepare_optimizer(one) if isinstance(one, Optimizer) else one for one in given]
        for index, one in enumerate(prepared):
            if isinstance(one, nn.Module):
                add_prepared_model(self, one)
            elif isinstance(one, DataLoader):
                prepared[index] = self.prepare_data_loader(one)
            elif isinstance(one, LRScheduler):
                prepared[index] = self.prepare_scheduler(one)
        for one in prepared:
            if isinstance(one, (Optimizer, AcceleratedScheduler)):
                mark_prepared(one)
        return prepared

    def _wrapped(self, model: nn.Module) -> SyncedModule:
        wrapper = self._sessions.wrapper_of(model) or self._sessions.wrap(model, automatic=True)
        mark_prepared(wrapper)
        return wrapper
