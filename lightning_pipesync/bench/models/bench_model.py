"""What a benchmark trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class BenchModel:
    """A module, and what it needs to be trained.

    Attributes:
        name: under which :func:`build_model` knows it.
        module: on the CPU, in fp32.
        layers: the parts of ``module`` that a user of FSDP2 would call ``fully_shard`` on, one after the other, before
            the module itself; in the order of execution.
        make_batch: returns the batch of a rank: the same in every call, different for every rank.
        loss: computes the loss (0-dim) from ``module``, or a wrapper of it, and a batch.
    """

    name: str
    module: nn.Module
    layers: list[nn.Module]
    make_batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], Tensor]
