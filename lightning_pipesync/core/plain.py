"""Plain values as JSON: what is read from it is data, and runs no code of the sender's.

Plain are None, numbers, texts, bytes, lists, tuples, sets, dicts, tensors, dtypes, devices, shapes, and members of
enumerations and dataclasses of this package. NumPy's numbers become Python's.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

#: What the modules begin with whose enumerations and dataclasses are plain.
PACKAGE = f"{__name__.partition('.')[0]}."


def encode(value: Any, number: Callable[[Tensor], int]) -> str:
    """Returns plain values as JSON, with the result of ``number``, called in order, in place of each tensor.

    Raises:
        TypeError: something is not plain; the message names its type.
    """
    return json.dumps(_encoded(value, number), separators=(",", ":"))


def tensors_among(value: Any) -> list[Tensor]:
    """Returns the tensors among plain values, in order; raises as :func:`encode` does."""
    tensors: list[Tensor] = []

    def found(tensor: Tensor) -> int:
        tensors.append(tensor)
        return len(tensors)

    _encoded(value, found)
    return tensors


def decode(text: str, tensor: Callable[[int], Any]) -> Any:
    """Returns what :func:`encode` was given; ``tensor`` returns the tensor of a number.

    Raises:
        ValueError: it is not the text of plain values.
    """
    try:
        return _decoded(json.loads(text), tensor)
    except (TypeError, LookupError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{text[:80]!r} is no text of plain values: {type(error).__name__}: {error}") from error


def _encoded(value: Any, number: Callable[[Tensor], int]) -> Any:
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind is list:
        kinds = set(map(type, value))
        if kinds == {bool}:  # whether each parameter has a gradient, say
            return {"bools": "".join("01"[flag] for flag in value)}
        return value if kinds <= _AS_THEY_ARE else [_encoded(item, number) for item in value]
    if kind in _SEQUENCES:
        return {_SEQUENCES[kind]: [_encoded(item, number) for item in value]}
    if kind is dict:
        return {"dict": [[_encoded(key, number), _encoded(item, number)] for key, item in value.items()]}
    if isinstance(value, Tensor):
        return {"tensor": number(value)}
    if kind.__module__.startswith(PACKAGE):
        module = kind.__module__.removeprefix(PACKAGE)
        if isinstance(value, Enum):
            return {"enum": [module, kind.__qualname__, value.name]}
        if dataclasses.is_dataclass(value):
            values = [_encoded(getattr(value, field.name), number) for field in dataclasses.fields(value)]
            return {"data": [module, kind.__qualname__, values]}
    if isinstance(value, np.generic) and type(value.item()) in (int, float, bool, complex):
        return _encoded(value.item(), number)
    if kind in _TEXTS:
        return {_TEXTS[kind]: str(value).removeprefix("torch.")}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind is bytes:
        return {"bytes": value.hex()}
    raise TypeError(f"A value of type {kind.__module__}.{kind.__qualname__} is not plain.")


_AS_THEY_ARE = {int, float, str, bool, type(None)}
_SEQUENCES: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset", torch.Size: "size"}
_TEXTS: dict[type, str] = {torch.dtype: "dtype", torch.device: "device"}
_MAKE_SEQUENCE: dict[str, Callable[[Any], Any]] = {name: kind for kind, name in _SEQUENCES.items()}
_MAKE: dict[str, Callable[[Any], Any]] = {
    "dtype": lambda name: dtype_of(name),
    "device": torch.device,
    "bools": lambda text: [flag == "1" for flag in text],
    "complex": lambda parts: complex(*parts),
    "bytes": bytes.fromhex,
    "enum": lambda parts: _class_of(parts[0], parts[1], Enum)[parts[2]],
}


def _decoded(value: Any, tensor: Callable[[int], Any]) -> Any:
    if isinstance(value, list):
        return [_decoded(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    [(tag, content)] = value.items()
    if tag == "tensor":
        return tensor(content)
    if tag == "dict":
        return {_decoded(key, tensor): _decoded(item, tensor) for key, item in content}
    if tag == "data":
        module, name, values = content
        return _class_of(module, name, None)(*(_decoded(item, tensor) for item in values))
    if tag in _MAKE_SEQUENCE:
        return _MAKE_SEQUENCE[tag](_decoded(item, tensor) for item in content)
    return _MAKE[tag](content)


def dtype_of(name: str) -> torch.dtype:
    """Returns the dtype with this name in torch.

    Raises:
        TypeError: there is none.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name!r} is no dtype")
    return found


def _class_of(module: str, name: str, base: type | None) -> Any:
    """Returns a class of this package: a subclass of ``base``, or, if that is None, a dataclass."""
    found: Any = sys.modules[PACKAGE + module]
    for part in name.split("."):
        found = getattr(found, part)
    fits = isinstance(found, type) and (dataclasses.is_dataclass(found) if base is None else issubclass(found, base))
    if not fits or not found.__module__.startswith(PACKAGE):
        raise TypeError(f"{module}.{name} is no class of plain values")
    return found
