"""Strategies of Lightning Fabric for the methods; importing this package registers their names."""

from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from lightning.fabric.strategies import STRATEGY_REGISTRY, DDPStrategy

from lightning_pipesync.fabric.private import import_twin
from lightning_pipesync.fabric.strategy import fabric_strategy
from lightning_pipesync.methods.method import Method
from lightning_pipesync.training.registry import METHODS
from lightning_pipesync.training.strategies import Strategies

_STRATEGIES = [Strategies(__name__, STRATEGY_REGISTRY, partial(fabric_strategy, DDPStrategy))]
if find_spec("lightning_fabric") is not None:
    import_twin("lightning_fabric.strategies")
    _STRATEGIES.append(import_module("lightning_pipesync.fabric.twin").STRATEGIES)


def register(method: type[Method]) -> None:
    """Creates the strategy classes of a method, ``<Method>FabricStrategy``, and registers its name with Fabric."""
    for strategies in _STRATEGIES:
        strategies.register(method)


def __getattr__(name: str) -> Any:
    """Returns the strategy class of that name, ``<Method>FabricStrategy``."""
    return _STRATEGIES[0].find(name)


for _method in METHODS.values():
    register(_method)
