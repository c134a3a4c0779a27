"""What a traced model is called with and returns, without the values of the tensors in it."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any

import torch
from torch import Tensor

from lightning_pipesync.core.torch_private import map_tensors, paths_in, tensors_in, tree_flatten, tree_unflatten


@dataclass(frozen=True)
class Call:
    """What a module is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hooks: bool = True  # whether the module's own hooks are to run, too, or have run already


@dataclass(frozen=True)
class _Described:
    """A tensor without its values; the strides are None if it is contiguous."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None


#: What may be among tensors; and what other processes must find under its name.
_PLAIN = (
    *(_Described, NoneType, bool, int, float, complex, str, bytes, Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_IMPORTED = (type, FunctionType, BuiltinFunctionType)


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
        return *map(_key_of, leaves), spec

    def check(self, what: str) -> None:
        """Checks that what is no tensor in it can be told from others, and travel.

        Raises:
            ValueError: something cannot; the message begins with ``what``.
        """
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
        """Returns the containers with ``tensors`` in their places."""
        remaining = iter(tensors)
        leaves, spec = tree_flatten(self.tree)
        return tree_unflatten([next(remaining) if isinstance(leaf, _Described) else leaf for leaf in leaves], spec)

    def zeros(self, device: torch.device) -> tuple[Tensor, ...]:
        """Returns tensors as they are described."""
        found = [leaf for leaf in tree_flatten(self.tree)[0] if isinstance(leaf, _Described)]
        return tuple(_zeros(one, device) for one in found)


def with_strides(tensor: Tensor, strides: tuple[int, ...] | None) -> Tensor:
    """Returns the same values with these strides: what is a view of what, and not a copy, depends on them."""
    if strides is None:
        return tensor.contiguous()
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


def _key_of(leaf: Any) -> tuple[Any, ...]:
    return type(leaf), repr(leaf) if isinstance(
        leaf, (int, float, complex)
    ) else leaf  # True == 1 == 1.0, and nan != nan


def _is_importable(leaf: Any) -> bool:
    """Returns whether other processes find the function or class under its name."""
    try:
        pickle.dumps(leaf)
    except Exception:  # which one depends on where it was defined
        return False
    return True


def _describe(tensor: Tensor) -> _Described | Tensor:
    if tensor.layout is not torch.strided:
        return tensor  # which is refused
    strides = None if tensor.is_contiguous() else tensor.stride()
    return _Described(tuple(tensor.shape), tensor.dtype, strides)


def described(tree: Any) -> tuple[Layout, list[Tensor]]:
    """Returns the containers and the tensors in them."""
    layout = map_tensors(_describe, tree)
    return Layout(layout), tensors_in(tree)


def varying(layouts: Sequence[Layout]) -> list[str]:
    """Returns where those that have the containers of the last one have not all the same."""
    *_, spec = layouts[-1].key()
    keys = [layout.key()[:-1] for layout in layouts if layout.key()[-1] == spec]
    return [path for path, *found in zip(paths_in(layouts[-1].tree), *keys, strict=True) if len(set(found)) > 1]


def input_of(value: Any) -> tuple[Layout, list[Tensor]]:
    """Returns what a model is called with, in :class:`Call` or as the only argument.

    Raises:
        ValueError: a model cannot be traced with it.
    """
    call = value if isinstance(value, Call) else Call((value,), {})
    layout, tensors = described(vars(call))
    layout.check("The model's input")
    return layout, tensors
