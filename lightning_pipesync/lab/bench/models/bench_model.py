"""The model of a benchmark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipesync.core.torch_private import map_tensors


@dataclass(frozen=True)
class BenchModel:
    """A module with its batches and its loss."""

    #: The name in tables.
    name: str
    module: nn.Module  #: in fp32
    #: Its parts for ``fully_shard`` of FSDP2, in the order of execution.
    layers: list[nn.Module]
    #: Returns the batch of a rank, the same in every call.
    make_batch: Callable[[int], Any]
    #: Returns the loss (0-dim) of the module on a batch.
    loss: Callable[[nn.Module, Any], Tensor]
    #: Returns the optimizer of the module; None: that of all candidates.
    optimizer: Callable[[nn.Module], Optimizer] | None = None

    def to(self, device: torch.device | str) -> BenchModel:
        """Returns the model with its module, which is moved, and its batches on a device."""
        if torch.device(device).type == "cpu":
            return self

        def make_batch(rank: int) -> Any:
            return map_tensors(lambda tensor: tensor.to(device), self.make_batch(rank))

        return replace(self, module=self.module.to(device), make_batch=make_batch)
