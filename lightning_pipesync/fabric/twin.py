"""Strategies of the Fabric of ``lightning_fabric``; importing this module registers their names."""

from __future__ import annotations

from lightning_fabric.strategies import STRATEGY_REGISTRY, DDPStrategy

from lightning_pipesync.fabric.strategy import mixin_of
from lightning_pipesync.training.strategies import Strategies

#: Adds the class of each method, such as ``DeARFabricStrategy``, to this module.
STRATEGIES = Strategies(STRATEGY_REGISTRY, globals(), "FabricStrategy", DDPStrategy, mixin_of)
