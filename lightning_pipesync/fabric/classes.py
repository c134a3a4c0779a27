"""The strategies for the ``lightning`` distribution."""

from __future__ import annotations

from lightning.fabric.strategies import DDPStrategy

from lightning_pipesync.fabric.dear import DeARFabricStrategyMixin
from lightning_pipesync.fabric.pipe_sgd import PipeSGDFabricStrategyMixin
from lightning_pipesync.fabric.selsync import SelSyncFabricStrategyMixin
from lightning_pipesync.fabric.strategy import PipeSyncFabricStrategyMixin


class DeARFabricStrategy(DeARFabricStrategyMixin, DDPStrategy):
    __doc__ = DeARFabricStrategyMixin.__doc__


class PipeSGDFabricStrategy(PipeSGDFabricStrategyMixin, DDPStrategy):
    __doc__ = PipeSGDFabricStrategyMixin.__doc__


class SelSyncFabricStrategy(SelSyncFabricStrategyMixin, DDPStrategy):
    __doc__ = SelSyncFabricStrategyMixin.__doc__


STRATEGIES: list[type[PipeSyncFabricStrategyMixin]] = [DeARFabricStrategy, PipeSGDFabricStrategy, SelSyncFabricStrategy]
