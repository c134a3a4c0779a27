"""``Fabric(strategy="dear")``."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipesync.core.storage import unshare_storage
from lightning_pipesync.fabric.module import SyncedModule
from lightning_pipesync.fabric.strategy import PipeSyncFabricStrategyMixin
from lightning_pipesync.methods.dear import DeAR


class DeARFabricStrategyMixin(PipeSyncFabricStrategyMixin):
    """DeAR for Fabric: synchronous SGD, the all-reduce hidden under the backward pass and the next forward pass.

    What is trained is what ``strategy="ddp"`` would train. ``p.grad`` stays this rank's own gradient: the average of
    all is never put together on one rank.

    Args:
        settings: see :class:`DeARConfig`; further ones as in DDPStrategy.

    Raises:
        ValueError: there is no such setting, or it is out of its range; the message names it and its value.
    """

    name = "dear"

    def attach_method(self, module: nn.Module, optimizers: list[Optimizer]) -> DeAR:
        config = self.config.on_hosts_of(self.num_processes, self.world_size)
        return DeAR(module, optimizers, config, backend=self._traffic_backend)

    @override
    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        state = super().get_module_state_dict(module)
        return unshare_storage(state) if isinstance(module, SyncedModule) else state
