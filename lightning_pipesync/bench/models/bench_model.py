"""The model of a benchmark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class BenchModel:
    """A module with its batches and its loss.

    Attributes:
        name: the name for :func:`build_model`.
        module: the module, on the CPU, in fp32.
        layers: the parts of ``module`` for ``fully_shard`` of FSDP2, in the order of execution.
        make_batch: returns the batch of a rank: the same in every call, different for every rank.
        loss: computes the loss (0-dim) from ``module``, or a wrapper of it, and a batch.
    """

    name: str
    module: nn.Module
    layers: list[nn.Module]
    make_batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], Tensor]
