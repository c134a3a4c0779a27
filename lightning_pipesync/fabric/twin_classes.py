"""The same for the twin distribution ``lightning_fabric``, whose classes are others."""

from __future__ import annotations

from lightning_fabric.strategies import DDPStrategy

from lightning_pipesync.fabric.dear import DeARFabricStrategyMixin
from lightning_pipesync.fabric.pipe_sgd import PipeSGDFabricStrategyMixin
from lightning_pipesync.fabric.selsync import SelSyncFabricStrategyMixin
from lightning_pipesync.fabric.strategy import PipeSyncFabricStrategyMixin


class DeARFabricStrategy(DeARFabricStrategyMixin, DDPStrategy):  # type: ignore[misc]
    __doc__ = DeARFabricStrategyMixin.__doc__


class PipeSGDFabricStrategy(PipeSGDFabricStrategyMixin, DDPStrategy):  # type: ignore[misc]
    __doc__ = PipeSGDFabricStrategyMixin.__doc__


class SelSyncFabricStrategy(SelSyncFabricStrategyMixin, DDPStrategy):  # type: ignore[misc]
    __doc__ = SelSyncFabricStrategyMixin.__doc__


STRATEGIES: list[type[PipeSyncFabricStrategyMixin]] = [DeARFabricStrategy, PipeSGDFabricStrategy, SelSyncFabricStrategy]
