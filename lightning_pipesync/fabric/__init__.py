"""Strategies of the Fabric of ``lightning.fabric``; importing this module registers their names."""

from __future__ import annotations

from lightning_pipesync.core.extras import import_first_installed

# This registers the Trainer's strategies, which import modules of this package.
import_first_installed("lightning", "lightning_fabric")

from lightning_pipesync.fabric.distribution import STRATEGY_REGISTRY, DDPStrategy
from lightning_pipesync.fabric.strategy import mixin_of
from lightning_pipesync.training.strategies import Strategies

#: Adds the class of each method, such as ``DeARFabricStrategy``, to this module.
STRATEGIES = Strategies(STRATEGY_REGISTRY, globals(), "FabricStrategy", DDPStrategy, mixin_of)
