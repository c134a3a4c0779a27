"""The only module that uses private names of Accelerate."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.optim import Optimizer

from lightning_pipesync.core.private_names import require


def check_accelerator(accelerator: Accelerator) -> None:
    """Checks, before anything is prepared, that an Accelerator has the private lists of what it prepares."""
    require(accelerator, "_models", "_optimizers", "_dataloaders", "_schedulers", "_custom_objects")


def check_marked(prepared: Any) -> None:
    """Checks that Accelerate marks prepared optimizers with the attribute that :func:`mark_prepared` sets."""
    for known in prepared if isinstance(prepared, tuple) else (prepared,):
        if isinstance(known, AcceleratedOptimizer):
            require(known, "_is_accelerate_prepared")


def mark_prepared(prepared: Any) -> None:
    """Marks ``prepared`` as prepared, so that Accelerate does not prepare it again."""
    prepared._is_accelerate_prepared = True


def is_prepared(given: Any) -> bool:
    """Returns whether ``given`` is marked as prepared."""
    return bool(getattr(given, "_is_accelerate_prepared", False))


def prepared_models(accelerator: Any) -> list[nn.Module]:
    """Returns the models that an Accelerator saves: its own list, as of the functions below."""
    models: list[nn.Module] = accelerator._models
    return models


def prepared_optimizers(accelerator: Any) -> list[Optimizer]:
    """Returns the optimizers that an Accelerator has prepared."""
    optimizers: list[Optimizer] = accelerator._optimizers
    return optimizers


def prepared_loaders(accelerator: Any) -> list[Any]:
    """Returns the loaders that an Accelerator has prepared."""
    loaders: list[Any] = accelerator._dataloaders
    return loaders


def saved_besides_optimizers(accelerator: Any) -> dict[str, list[Any]]:
    """Returns what has a state that an Accelerator saves besides those of models and optimizers."""
    return {
        "schedulers": list(accelerator._schedulers),
        "registered objects": list(accelerator._custom_objects),
        "loss scalers": [] if accelerator.scaler is None else [accelerator.scaler],
    }


def use_fsdp_on_cpu(plugin: Any) -> None:
    """Makes Accelerators shard on the CPU, too, where they ignore an ``fsdp_plugin``."""
    state = AcceleratorState()
    require(state, "distributed_type")
    if state.mixed_precision != "no":
        plugin.set_mixed_precision(state.mixed_precision)
    state.fsdp_plugin = plugin
    state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
