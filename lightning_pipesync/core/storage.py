"""Storage that tensors share, as views of a fused buffer do."""

from __future__ import annotations

from copy import copy
from typing import Any

from torch import Tensor

from lightning_pipesync.core.torch_private import is_dtensor


def unshare_storage(state: dict[str, Any]) -> dict[str, Any]:
    """Returns ``state`` with a copy in place of each tensor that is a view of a larger buffer.

    Some file formats refuse tensors that share storage, as fused weights do. Tied weights stay tied.
    """
    copies: dict[tuple[Any, ...], Tensor] = {}
    result = copy(state)  # keeps the attributes that torch sets on it
    for name, value in state.items():
        if not isinstance(value, Tensor) or is_dtensor(value) or value.untyped_storage().nbytes() == value.nbytes:
            continue
        key = value.data_ptr(), value.dtype, value.shape, value.stride()
        if key not in copies:
            copies[key] = value.clone()
        result[name] = copies[key]
    return result
