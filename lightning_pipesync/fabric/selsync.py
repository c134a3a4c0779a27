"""``Fabric(strategy="selsync")``."""

from __future__ import annotations

import os
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_pipesync.data import TrainLoader
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

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.checkpoint_replicas = self.config.checkpoint_replicas

    def attach_method(self, module: nn.Module, optimizers: list[Optimizer]) -> SelSync:
        return SelSync(module, optimizers, self.config, backend=self._traffic_backend)

    def prepare_train_loader(self, loader: DataLoader, optimizer: Optimizer | None = None) -> TrainLoader:
        """Takes the place of ``fabric.setup_dataloaders`` for the training data, after ``fabric.setup``.

        Its batches are as the settings ``partition``, ``full_pass`` and ``injection`` have them, and on the device; its
        order has the seed of ``fabric.seed_everything``. A collective call.

        Args:
            loader: as the user has made it.
            optimizer: that trains on the data; may be left out as in :meth:`method_of`.

        Raises:
            ValueError: as in :meth:`SelSync.prepare_train_loader` and :meth:`method_of`.
        """
        method = cast("SelSync", self.method_of(optimizer))
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        return method.prepare_train_loader(loader, seed, self.batch_to_device)
