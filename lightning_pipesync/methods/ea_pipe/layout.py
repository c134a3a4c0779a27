"""What a traced model is called with and returns, without the values of the tensors in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_pipesync.compat import map_tensors, tensors_in, tree_flatten, tree_unflatten


@dataclass(frozen=True)
class Call:
    """What a module is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class _Described:
    """A tensor without its values; the strides are None if it is contiguous."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None


@dataclass(frozen=True)
class Layout:
    """Nested containers without the values of the tensors in them.

    Attributes:
        tree: the containers, with tensors described.
    """

    tree: Any

    def key(self) -> tuple[Any, ...]:
        """Returns something to hash that tells this from other layouts."""
        leaves, spec = tree_flatten(self.tree)
        return *leaves, spec

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """Returns the containers with ``tensors`` in their places."""
        remaining = iter(tensors)
        leaves, spec = tree_flatten(self.tree)
        return tree_unflatten([next(remaining) if isinstance(leaf, _Described) else leaf for leaf in leaves], spec)

    def zeros(self, device: torch.device) -> tuple[Tensor, ...]:
        """Returns tensors as they are described."""
        found = [leaf for leaf in tree_flatten(self.tree)[0] if isinstance(leaf, _Described)]
        return tuple(_zeros(one, device) for one in found)


def with_strides(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Returns the same values with these strides: what is a view of what, and not a copy, depends on them."""
    if tensor.stride() == strides:
        return tensor
    values = tensor
    for dim, stride in enumerate(strides):
        if stride == 0 and tensor.shape[dim] > 1:  # it was expanded
            values = values.narrow(dim, 0, 1)
    return (
        torch.empty_strided(values.shape, strides, dtype=tensor.dtype, device=tensor.device)
        .copy_(values)
        .expand_as(tensor)
    )


def _zeros(one: _Described, device: torch.device) -> Tensor:
    if one.strides is None:
        return torch.zeros(one.shape, dtype=one.dtype, device=device)
    length = 1 + sum((size - 1) * stride for size, stride in zip(one.shape, one.strides, strict=True))
    return torch.zeros(length, dtype=one.dtype, device=device).as_strided(one.shape, one.strides)


def _describe(tensor: Tensor) -> _Described:
    strides = None if tensor.is_contiguous() else tensor.stride()
    return _Described(tuple(tensor.shape), tensor.dtype, strides)


def described(tree: Any) -> tuple[Layout, list[Tensor]]:
    """Returns the containers and the tensors in them."""
    layout = map_tensors(_describe, tree)
    return Layout(layout), tensors_in(tree)


def input_of(value: Any) -> tuple[Layout, list[Tensor]]:
    """Returns what a model is called with, in :class:`Call` or as the only argument."""
    call = value if isinstance(value, Call) else Call((value,), {})
    return described((call.args, call.kwargs))
