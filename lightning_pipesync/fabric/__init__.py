"""Strategies of Lightning Fabric for the methods; importing this package registers their names."""

from functools import partial
from typing import Any

from lightning.fabric.strategies import STRATEGY_REGISTRY, DDPStrategy

from lightning_pipesync.fabric.strategy import fabric_strategy
from lightning_pipesync.training.strategies import Strategies

STRATEGIES = Strategies(__name__, STRATEGY_REGISTRY, partial(fabric_strategy, DDPStrategy))


def __getattr__(name: str) -> Any:
    """Returns the strategy class of that name, ``<Method>FabricStrategy``."""
    return STRATEGIES.find(name)
