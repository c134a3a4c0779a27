"""The only place that touches a private name of torch or lightning, so that an upgrade breaks one file."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree


def foreach_copy_(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copies each source into its target, in one call."""
    if targets:
        torch._foreach_copy_(targets, sources)


def foreach_norm(tensors: list[Tensor]) -> list[Tensor]:
    """Returns the L2 norm of each tensor as a 0-dim tensor: fp32, or fp64 if one of them is."""
    dtype = functools.reduce(torch.promote_types, {tensor.dtype for tensor in tensors}, torch.float32)
    return list(torch._foreach_norm(tensors, 2, dtype))


def version(tensor: Tensor) -> int:
    """Returns a number that grows whenever autograd sees ``tensor`` written in place."""
    return tensor._version


def is_dtensor(tensor: Tensor) -> bool:
    """Returns whether ``tensor`` is a ``DTensor``, whose module moved between the versions of torch."""
    return any(cls.__name__ == "DTensor" for cls in type(tensor).__mro__)


def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """Splits nested containers into their leaves and what rebuilds them."""
    return _pytree.tree_flatten(tree)


def tree_unflatten(leaves: list[Any], spec: Any) -> Any:
    """Rebuilds nested containers from their leaves."""
    return _pytree.tree_unflatten(leaves, spec)
