"""The structure of a traced model's input and output, without the values of their tensors."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any

import torch
from torch import Tensor

from lightning_pipesync.core.torch_private import map_tensors, tensors_in, tree_flatten, tree_unflatten


@dataclass(frozen=True)
class Call:
    """The arguments of a call of a model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hooks: bool = True
    """Whether to run the model's forward hooks, which may have run already."""


@dataclass(frozen=True)
class _Described:
    """The metadata of a tensor; the strides are None if it is contiguous."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None


#: Types that may occur besides tensors; and those that other processes must be able to import.
_PLAIN = (
    *(_Described, NoneType, bool, int, float, complex, str, bytes, Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_IMPORTED = (type, FunctionType, BuiltinFunctionType)


@dataclass(frozen=True)
class Layout:
    """Nested containers with the metadata of their tensors."""

    tree: Any

    def key(self) -> tuple[Any, ...]:
        """Returns a hashable key, which differs between layouts."""
        leaves, spec = tree_flatten(self.tree)
        return *map(_key_of, leaves), spec

    def check(self, what: str) -> None:
        """Raises a ValueError that begins with ``what`` if a leaf cannot be compared and sent."""
        for leaf in tree_flatten(self.tree)[0]:
            if isinstance(leaf, Tensor):
                raise ValueError(
                    f"{what} holds a tensor whose layout is {leaf.layout}: make it dense, with to_dense()."
                )
            if not isinstance(leaf, _PLAIN) and not (isinstance(leaf, _IMPORTED) and _is_importable(leaf)):
                raise ValueError(
                    f"{what} holds a {type(leaf).__qualname__}, and what is traced has tensors, numbers, strings, "
                    "enums and importable functions in tuples, lists and dictionaries: make it one, as with dict(...) "
                    "or torch.as_tensor(...), or register a dataclass with torch.export.register_dataclass(...)."
                )

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """Returns the containers with ``tensors`` in place of their metadata."""
        remaining = iter(tensors)
        leaves, spec = tree_flatten(self.tree)
        return tree_unflatten([next(remaining) if isinstance(leaf, _Described) else leaf for leaf in leaves], spec)

    def zeros(self, device: torch.device) -> tuple[Tensor, ...]:
        return tuple(_zeros(leaf, device) for leaf in tree_flatten(self.tree)[0] if isinstance(leaf, _Described))


def with_strides(tensor: Tensor, strides: tuple[int, ...] | None) -> Tensor:
    """Returns the same values with ``strides``, which decide whether an operation returns a view or a copy."""
    if strides is None:
        return tensor.contiguous()
    if tensor.stride() == strides:
        return tensor
    values = tensor
    for dim, stride in enumerate(strides):
        if stride == 0 and tensor.shape[dim] > 1:  # it was expanded
            values = values.narrow(dim, 0, 1)
    laid_out = torch.empty_strided(values.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return laid_out.copy_(values).expand_as(tensor)


def _zeros(like: _Described, device: torch.device) -> Tensor:
    shape, strides = like.shape, like.strides
    if strides is None:
        return torch.zeros(shape, dtype=like.dtype, device=device)
    length = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return torch.zeros(length, dtype=like.dtype, device=device).as_strided(shape, strides)


def _key_of(leaf: Any) -> tuple[Any, ...]:
    is_number = isinstance(leaf, (int, float, complex))
    return type(leaf), repr(leaf) if is_number else leaf  # True == 1 == 1.0, and nan != nan


def _is_importable(leaf: Any) -> bool:
    try:
        pickle.dumps(leaf)
    except Exception:  # the type depends on where it is defined
        return False
    return True


def _describe(tensor: Tensor) -> _Described | Tensor:
    if tensor.layout is not torch.strided:
        return tensor  # check() refuses it
    strides = None if tensor.is_contiguous() else tensor.stride()
    return _Described(tuple(tensor.shape), tensor.dtype, strides)


def described(tree: Any) -> tuple[Layout, list[Tensor]]:
    """Returns the layout of nested containers, and their tensors."""
    return Layout(map_tensors(_describe, tree)), tensors_in(tree)


def input_of(value: Any) -> tuple[Layout, list[Tensor]]:
    """Returns the layout and the tensors of a model's input: a :class:`Call`, or the only argument."""
    call = value if isinstance(value, Call) else Call((value,), {})
    layout, tensors = described(vars(call))
    layout.check("The model's input")
    return layout, tensors
