"""Private names of Lightning that Fabric and the Trainer share: the only place that uses them."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_pipesync.core.private_names import require

#: Packages of Lightning's distributions.
LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Returns the optimizer that Lightning has wrapped, or the one given."""
    if not any(cls.__module__.partition(".")[0] in LIGHTNING for cls in type(optimizer).__mro__):
        return optimizer
    require(optimizer, "_optimizer")
    wrapped: Optimizer = optimizer._optimizer  # type: ignore[attr-defined]
    return wrapped


def scaler_of(precision: Any) -> torch.amp.GradScaler | None:
    """Returns the loss scaler of a precision plugin of Lightning's; None if the precision needs none."""
    if precision.precision == "16-mixed":
        require(precision, "scaler")
    return getattr(precision, "scaler", None)


def control_backward_sync(strategy: Any, control: Any) -> None:
    """Has ``fabric.no_backward_sync`` ask ``control``, in place of that which a strategy of Fabric has itself."""
    require(strategy, "_backward_sync_control")
    strategy._backward_sync_control = control


def import_twin(name: str) -> ModuleType:
    """Imports a module of the distribution ``pytorch_lightning``, and leaves the messages of ``lightning`` alone.

    Both set the log and the category of the functions that they share, and the last one to be imported has its way.
    """
    from lightning_utilities.core import rank_zero

    log, category = rank_zero.log, rank_zero.rank_zero_deprecation_category
    try:
        return import_module(name)
    finally:
        rank_zero.log, rank_zero.rank_zero_deprecation_category = log, category
