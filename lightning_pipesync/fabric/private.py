"""The only module that uses private names of Lightning which Fabric and the Trainer share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_pipesync.core.private_names import require
from lightning_pipesync.fabric.distribution import init_utilities

#: Packages of Lightning's distributions.
LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Returns the optimizer inside Lightning's wrapper, or ``optimizer`` itself if it is not wrapped."""
    if not any(cls.__module__.partition(".")[0] in LIGHTNING for cls in type(optimizer).__mro__):
        return optimizer
    wrapped: Optimizer = optimizer.optimizer  # type: ignore[attr-defined]
    return wrapped


def scaler_of(precision: Any) -> torch.amp.GradScaler | None:
    """Returns the loss scaler of a Lightning precision plugin; None if it has none."""
    if precision.precision == "16-mixed":
        require(precision, "scaler")
    return getattr(precision, "scaler", None)


def control_backward_sync(strategy: Any, control: Any) -> None:
    """Replaces the object of a Fabric strategy that implements ``fabric.no_backward_sync``."""
    require(strategy, "_backward_sync_control")
    strategy._backward_sync_control = control


def materialize(module: nn.Module, device: torch.device) -> None:
    """Gives a module that was made on the meta device memory on ``device``, and resets its parameters.

    It warns of parts without ``reset_parameters()``, whose values are undefined until they are loaded.
    """
    require(init_utilities, "_materialize_distributed_module")
    init_utilities._materialize_distributed_module(module, device)
