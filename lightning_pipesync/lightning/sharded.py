"""Modules that shard themselves in ``configure_model``: their device mesh, their weights, and whole checkpoints."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipesync.core.dtensors import is_sharded
from lightning_pipesync.fabric.distribution import rank_zero_warn
from lightning_pipesync.fabric.private import materialize
from lightning_pipesync.fabric.sharded import DeviceMeshMixin
from lightning_pipesync.lightning.private import name_refused_copies, set_device_mesh
from lightning_pipesync.lightning.strategy import PipeSyncStrategyMixin
from lightning_pipesync.methods.sync_method import SyncMethod
from lightning_pipesync.training.sharded_state import share_weights, state_of_shards, whole_state

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class ShardedModuleMixin(DeviceMeshMixin, PipeSyncStrategyMixin[SyncMethod]):
    """Gives a module its device mesh; saves whole states of a sharded one, and loads each rank's shards of them."""

    _way_to_shard = "shard it in configure_model by self.device_mesh"

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self._mesh is not None:
            set_device_mesh(self._module, self._mesh)
        if self._fitting:
            name_refused_copies(self._trainer, self._refusal_of_average)

    @staticmethod
    def _refusal_of_average(callback: str) -> ValueError:
        return ValueError(
            f"{callback} copies the module, and FSDP2 does not allow that of one that is sharded: leave it out, or "
            "average this rank's shards, parameter.to_local(), in a callback of your own."
        )

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """As in DDPStrategy; with ``empty_init`` and a device mesh on the meta device, until the module is sharded."""
        if not empty_init or self.layout.ranks_per_replica == 1:
            with super().tensor_init_context(empty_init):
                yield
            return
        with torch.device("meta"), self.precision_plugin.tensor_init_context():
            yield

    @override
    def setup(self, trainer: Trainer) -> None:
        self._materialize()
        if trainer.state.fn == "fit" or not self._is_sharded:
            super().setup(trainer)
            return
        # DDPStrategy would copy rank 0's shards to all ranks.
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        share_weights(self._module, self._replicas_of(self._module))
        self.setup_precision_plugin()

    @property
    def _is_sharded(self) -> bool:
        return is_sharded(self._module)

    def _materialize(self) -> None:
        if self._is_sharded:
            materialize(self._module, self.root_device)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        state = super().lightning_module_state_dict()
        if self._is_sharded and self._interrupted:
            rank_zero_warn(
                "The checkpoint is saved after an error, when other ranks may be gone. Each rank has only a shard of "
                "the weights, so the checkpoint has none."
            )
            return {}
        return whole_state(self._module, state)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state = super().optimizer_state(optimizer)
        return state if self._interrupted else whole_state(optimizer, state)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._materialize()  # the memory for what is loaded
        state = state_of_shards(self._module, checkpoint["state_dict"])
        super().load_model_state_dict({**checkpoint, "state_dict": state}, strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        pairs = zip(self.optimizers, checkpoint["optimizer_states"], strict=False)  # as Lightning does
        super().load_optimizer_state_dict(
            {**checkpoint, "optimizer_states": [state_of_shards(*pair) for pair in pairs]}
        )
