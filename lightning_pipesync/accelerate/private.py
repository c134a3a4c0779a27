"""The only place that touches a private name of Accelerate, so that an upgrade breaks one file."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.optim import Optimizer

from lightning_pipesync.core.private_names import require


def check_accelerator(accelerator: Accelerator) -> None:
    """Checks, before anything is prepared, that an Accelerator keeps what it prepares where it did."""
    require(accelerator, "_models", "_optimizers", "_dataloaders")


def check_marked(prepared: Any) -> None:
    """Checks that Accelerate marks what it has prepared, of which optimizers are a part, as we do the rest."""
    for one in prepared if isinstance(prepared, tuple) else (prepared,):
        if isinstance(one, AcceleratedOptimizer):
            require(one, "_is_accelerate_prepared")


def mark_prepared(prepared: Any) -> None:
    """Has Accelerate know that ``prepared`` is what it prepares models to be."""
    prepared._is_accelerate_prepared = True


def is_prepared(given: Any) -> bool:
    """Returns whether Accelerate has prepared ``given`` before."""
    return bool(getattr(given, "_is_accelerate_prepared", False))


def prepared_models(accelerator: Any) -> list[nn.Module]:
    """Returns the models that an Accelerator saves."""
    return list(accelerator._models)


def prepared_optimizers(accelerator: Any) -> list[Optimizer]:
    """Returns the optimizers that an Accelerator has prepared."""
    return list(accelerator._optimizers)


def replace_prepared_optimizer(accelerator: Any, old: Optimizer, new: Optimizer) -> None:
    """Has an Accelerator use ``new`` where it has prepared ``old``."""
    optimizers = accelerator._optimizers
    optimizers[[id(optimizer) for optimizer in optimizers].index(id(old))] = new


def add_prepared_loader(accelerator: Any, loader: Any) -> None:
    """Has an Accelerator know a loader that was prepared in another way than its own."""
    accelerator._dataloaders.append(loader)
