"""``Fabric(strategy="selsync")``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from lightning_pipesync.fabric.strategy import PipeSyncFabricStrategyMixin
from lightning_pipesync.methods.selsync import SelSync


class SelSyncFabricStrategyMixin(PipeSyncFabricStrategyMixin):
    """SelSync for Fabric: local steps, synchronized only when some rank's gradient changes by more than ``delta``.

    Outside ``consolidated()`` each rank's weights are its own.

    Args:
        settings: see :class:`SelSyncConfig`; further ones as in DDPStrategy.

    Raises:
        ValueError: there is no such setting, or it is out of its range; the message names it and its value.
    """

    name = "selsync"
    not_in_fabric: ClassVar[Mapping[str, str]] = {
        "partition": "the order of the data is that of the loader: give it a SelDPSampler, or any other",
        "full_pass": "give the loader a SelDPSampler(full_pass=...)",
        "injection": "call a DataInjection on each batch, and give the loader its adjusted_batch_size",
    }

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.checkpoint_replicas = self.config.checkpoint_replicas

    def attach_method(self, module: nn.Module, optimizers: list[Optimizer]) -> SelSync:
        return SelSync(module, optimizers, self.config, backend=self._traffic_backend)
