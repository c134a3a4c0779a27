"""Strategies of Lightning's Trainer for all methods; importing this package registers their names."""

from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from lightning_pipesync.fabric.private import import_twin
from lightning_pipesync.lightning.classes import trainer_strategy
from lightning_pipesync.methods.method import Method
from lightning_pipesync.training.registry import METHODS
from lightning_pipesync.training.strategies import Strategies

_STRATEGIES = [Strategies(__name__, StrategyRegistry, partial(trainer_strategy, DDPStrategy, Callback))]
if find_spec("pytorch_lightning") is not None:
    import_twin("pytorch_lightning.strategies")
    _STRATEGIES.append(import_module("lightning_pipesync.lightning.twin").STRATEGIES)


def register(method: type[Method]) -> None:
    """Creates the strategy classes of a method, ``<Method>Strategy``, and registers its name with Lightning."""
    for strategies in _STRATEGIES:
        strategies.register(method)


def __getattr__(name: str) -> Any:
    """Returns the strategy class of that name, ``<Method>Strategy``."""
    return _STRATEGIES[0].find(name)


for _method in METHODS.values():
    register(_method)
