"""The methods as strategies of Lightning Fabric; importing this registers their names."""

from importlib import import_module
from importlib.util import find_spec

from lightning.fabric.strategies import STRATEGY_REGISTRY

from lightning_pipesync.fabric.classes import (
    STRATEGIES,
    DeARFabricStrategy,
    PipeSGDFabricStrategy,
    SelSyncFabricStrategy,
)
from lightning_pipesync.fabric.ea_pipe import refuse_ea_pipe
from lightning_pipesync.fabric.private import import_twin, register_strategy

__all__ = ["DeARFabricStrategy", "PipeSGDFabricStrategy", "SelSyncFabricStrategy"]


def _register() -> None:
    registered = [(STRATEGY_REGISTRY, STRATEGIES)]
    if find_spec("lightning_fabric") is not None:
        registry = import_twin("lightning_fabric.strategies").STRATEGY_REGISTRY
        registered.append((registry, import_module("lightning_pipesync.fabric.twin_classes").STRATEGIES))
    for registry, strategies in registered:
        for strategy in strategies:
            register_strategy(registry, strategy.name, strategy)
        register_strategy(registry, "ea_pipe", refuse_ea_pipe)


_register()
