"""Strategies of the Fabric of ``lightning.fabric``; importing this module registers their names.

Written by docs/strategy_classes.py: change a method's settings instead, and run it.
"""

from __future__ import annotations

from lightning_pipesync.core.extras import import_first_installed

# This registers the Trainer's strategies, which import modules of this package.
import_first_installed("lightning", "lightning_fabric")

from lightning_pipesync.fabric import arguments
from lightning_pipesync.fabric.distribution import STRATEGY_REGISTRY, DDPStrategy
from lightning_pipesync.fabric.strategy import mixin_of
from lightning_pipesync.training.strategies import Strategies


class DeARFabricStrategy(arguments.DeARFabricStrategyMixin, DDPStrategy): ...


class LocalSGDFabricStrategy(arguments.LocalSGDFabricStrategyMixin, DDPStrategy): ...


class ParameterServerFabricStrategy(arguments.ParameterServerFabricStrategyMixin, DDPStrategy): ...


class PipeSGDFabricStrategy(arguments.PipeSGDFabricStrategyMixin, DDPStrategy): ...


class SelSyncFabricStrategy(arguments.SelSyncFabricStrategyMixin, DDPStrategy): ...


STRATEGIES = Strategies(STRATEGY_REGISTRY, globals(), "FabricStrategy", DDPStrategy, mixin_of)
