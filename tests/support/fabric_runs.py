"""Fabric on ranks that exist already, with strategies by their names and settings."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision

from lightning_pipesync.fabric import DeARFabricStrategy, PipeSGDFabricStrategy, SelSyncFabricStrategy

STRATEGIES: dict[str, Any] = {
    "dear": DeARFabricStrategy,
    "pipe_sgd": PipeSGDFabricStrategy,
    "selsync": SelSyncFabricStrategy,
}
NAMES = list(STRATEGIES)
#: With these a method is synchronous SGD.
SYNCHRONOUS: dict[str, dict[str, Any]] = {
    "dear": {},
    "pipe_sgd": {"staleness": 0},
    "selsync": {"delta": 0.0, "aggregation": "gradients"},
}


_launched: list[Fabric] = []


def launched(name: str, settings: Mapping[str, Any] | None = None, **kwargs: Any) -> Fabric:
    """A launched Fabric on the CPU, whose strategy is given by its name, or by its settings."""
    strategy = name if settings is None else STRATEGIES[name](**settings)
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy, **kwargs)
    fabric.launch()
    _launched.append(fabric)
    return fabric


def ended(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function, and ends the methods of each Fabric that it has launched."""
    try:
        return function(*args)
    finally:
        while _launched:
            _launched.pop().strategy.teardown()


def scaling(scale: float) -> MixedPrecision:
    """16-mixed precision with its loss scaler on the CPU, where Fabric would quietly take bf16-mixed."""
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3))
