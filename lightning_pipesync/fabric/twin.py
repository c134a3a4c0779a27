"""Strategies of the Fabric of ``lightning_fabric``; importing this module registers their names.

Written by docs/strategy_classes.py: change a method's settings instead, and run it.
"""

from __future__ import annotations

from lightning_fabric.strategies import STRATEGY_REGISTRY, DDPStrategy

from lightning_pipesync.fabric import arguments
from lightning_pipesync.fabric.strategy import mixin_of
from lightning_pipesync.training.strategies import Strategies


class DeARFabricStrategy(arguments.DeARFabricStrategyMixin, DDPStrategy): ...  # type: ignore[misc]


class LocalSGDFabricStrategy(arguments.LocalSGDFabricStrategyMixin, DDPStrategy): ...  # type: ignore[misc]


class ParameterServerFabricStrategy(arguments.ParameterServerFabricStrategyMixin, DDPStrategy): ...  # type: ignore[misc]


class PipeSGDFabricStrategy(arguments.PipeSGDFabricStrategyMixin, DDPStrategy): ...  # type: ignore[misc]


class SelSyncFabricStrategy(arguments.SelSyncFabricStrategyMixin, DDPStrategy): ...  # type: ignore[misc]


STRATEGIES = Strategies(STRATEGY_REGISTRY, globals(), "FabricStrategy", DDPStrategy, mixin_of)
