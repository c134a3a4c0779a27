"""Strategies of the Fabric of ``lightning_fabric``; importing this module registers their names.

Written by docs/strategy_classes.py: change a method's settings instead, and run it.
"""

from __future__ import annotations

from lightning_fabric.strategies import STRATEGY_REGISTRY, DDPStrategy

from lightning_pipesync.fabric import arguments
from lightning_pipesync.fabric.users_strategy import users_strategy
from lightning_pipesync.training.strategies import Strategies


class DeARFabricStrategy(arguments.DeARFabricStrategyMixin, DDPStrategy):  # type: ignore[misc]
    __doc__ = arguments.DeARFabricStrategyMixin.__doc__


class LocalSGDFabricStrategy(arguments.LocalSGDFabricStrategyMixin, DDPStrategy):  # type: ignore[misc]
    __doc__ = arguments.LocalSGDFabricStrategyMixin.__doc__


class ParameterServerFabricStrategy(arguments.ParameterServerFabricStrategyMixin, DDPStrategy):  # type: ignore[misc]
    __doc__ = arguments.ParameterServerFabricStrategyMixin.__doc__


class PipeSGDFabricStrategy(arguments.PipeSGDFabricStrategyMixin, DDPStrategy):  # type: ignore[misc]
    __doc__ = arguments.PipeSGDFabricStrategyMixin.__doc__


class SelSyncFabricStrategy(arguments.SelSyncFabricStrategyMixin, DDPStrategy):  # type: ignore[misc]
    __doc__ = arguments.SelSyncFabricStrategyMixin.__doc__


_make = users_strategy(DDPStrategy, __name__)
STRATEGIES = Strategies(STRATEGY_REGISTRY, globals(), "FabricStrategy", _make)
