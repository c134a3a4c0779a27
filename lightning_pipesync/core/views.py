"""Tensors that share the memory of a fused buffer."""

from __future__ import annotations

from copy import copy
from typing import Any

from torch import Tensor

from lightning_pipesync.core.torch_private import is_dtensor


def without_views(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a model's state, of the same type, with copies in place of views of a larger buffer.

    File formats take such views, as fused weights are, for copies of each other. Tied weights stay tied.
    """
    copies: dict[tuple[Any, ...], Tensor] = {}
    result = copy(state)  # with torch's own attributes
    for name, value in state.items():
        if not isinstance(value, Tensor) or is_dtensor(value) or value.untyped_storage().nbytes() == value.nbytes:
            continue
        key = value.data_ptr(), value.dtype, value.shape, value.stride()
        if key not in copies:
            copies[key] = value.clone()
        result[name] = copies[key]
    return result
