"""The only place that touches a private name of torch or lightning, so that an upgrade breaks one file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree


def foreach_copy_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source into its target, in one call."""
    if targets:
        torch._foreach_copy_(targets, sources)


def foreach_norm(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the L2 norm of each tensor as a 0-dim fp32 tensor (fp64 for fp64 input)."""
    dtype = None if tensors[0].dtype in (torch.float32, torch.float64) else torch.float32
    return list(torch._foreach_norm(tensors, 2, dtype))


def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """Splits nested containers into their leaves and what rebuilds them."""
    return _pytree.tree_flatten(tree)


def tree_unflatten(leaves: list[Any], spec: Any) -> Any:
    """Rebuilds nested containers from their leaves."""
    return _pytree.tree_unflatten(leaves, spec)
