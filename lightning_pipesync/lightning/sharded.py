"""Checkpoints of modules that shard themselves in ``configure_model``: those of any other module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipesync.core.dtensors import is_sharded
from lightning_pipesync.fabric.distribution import rank_zero_warn
from lightning_pipesync.lightning.strategy import PipeSyncStrategyMixin
from lightning_pipesync.methods.sync_method import SyncMethod


class ShardedModuleMixin(PipeSyncStrategyMixin[SyncMethod]):
    """Saves whole states of a module that FSDP2 has sharded, and loads each rank's shards of them."""

    @property
    def _is_sharded(self) -> bool:
        return is_sharded(self._module)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        state = super().lightning_module_state_dict()
        if self._is_sharded and self._interrupted:
            rank_zero_warn(
                "The checkpoint is saved after an error, when other ranks may be gone. Each rank has only a shard of "
                "the weights, so the checkpoint has none."
            )
            return {}
        return self._whole(state)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state = super().optimizer_state(optimizer)
        return state if self._interrupted else self._whole(state)

    def _whole(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns a state with whole tensors, if the module is sharded; a collective call."""
        if not self._is_sharded:
            return state
        from lightning_pipesync.training.sharded_state import whole_state  # imports DTensor, for half a second

        return whole_state(state)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if not self._is_sharded:
            super().load_model_state_dict(checkpoint, strict)
            return
        from lightning_pipesync.training.sharded_state import load_whole_state

        load_whole_state(self._module, checkpoint["state_dict"], strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._is_sharded:
            from lightning_pipesync.training.sharded_state import cut_optimizer_state

            pairs = zip(self.optimizers, checkpoint["optimizer_states"], strict=True)
            checkpoint = {**checkpoint, "optimizer_states": [cut_optimizer_state(*pair) for pair in pairs]}
        super().load_optimizer_state_dict(checkpoint)
