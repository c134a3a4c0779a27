"""The methods as strategies of Lightning's Trainer; importing this registers their names."""

from importlib import import_module
from importlib.util import find_spec

from lightning.pytorch.strategies import StrategyRegistry

from lightning_pipesync.fabric.private import import_twin, register_strategy
from lightning_pipesync.lightning.classes import (
    STRATEGIES,
    DeARStrategy,
    EAPipeStrategy,
    PipeSGDStrategy,
    PipeSyncCallback,
    SelSyncStrategy,
)

__all__ = ["DeARStrategy", "EAPipeStrategy", "PipeSGDStrategy", "PipeSyncCallback", "SelSyncStrategy"]


def _register() -> None:
    registered = [(StrategyRegistry, STRATEGIES)]
    if find_spec("pytorch_lightning") is not None:
        registry = import_twin("pytorch_lightning.strategies").StrategyRegistry
        registered.append((registry, import_module("lightning_pipesync.lightning.twin_classes").STRATEGIES))
    for registry, strategies in registered:
        for strategy in strategies:
            register_strategy(registry, strategy.name, strategy)


_register()
