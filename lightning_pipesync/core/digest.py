"""Digests of tensors and of states with tensors, to compare them without sending them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def digest(value: Any) -> str:
    """Returns 128 bits, as hexadecimal digits, of a tensor, or of nested containers with tensors and plain values.

    Of a tensor the values, the shape and the dtype count, bit for bit, not where and in which strides it is. A state
    has the same digest after ``torch.save`` and ``torch.load(weights_only=True)``. It finds accidents, and is no proof
    against an attacker, who could replace the digest, too.
    """
    found = hashlib.blake2b(digest_size=16)
    _add(found, value)
    return found.hexdigest()


def _add(found: hashlib.blake2b, value: Any) -> None:
    if isinstance(value, Tensor):
        values = value.detach().cpu().contiguous().reshape(-1)
        found.update(f"tensor {tuple(value.shape)} {value.dtype};".encode())
        found.update(values.view(torch.uint8).numpy().data)
    elif isinstance(value, Mapping):
        found.update(f"mapping {len(value)};".encode())
        for key in sorted(value, key=repr):
            _add(found, key)
            _add(found, value[key])
    elif isinstance(value, (list, tuple)):
        found.update(f"sequence {len(value)};".encode())
        for item in value:
            _add(found, item)
    elif isinstance(value, (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)):
        found.update(f"{value!r};".encode())
    else:  # its text may be an address in memory
        found.update(f"{type(value).__name__};".encode())
