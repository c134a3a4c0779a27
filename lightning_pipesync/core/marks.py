"""Whether tensors were written to, without a copy of them.

[Note: what counts as changed]
Parameters may be many, and are compared by autograd's version counter and by their norm, since ``p.data.copy_(...)``
does not change the counter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_pipesync.core.torch_private import foreach_norm, version


def marks_of(tensors: Sequence[Tensor]) -> list[tuple[int, str]]:
    """Returns version and norm of each tensor, see [Note: what counts as changed]."""
    floating = [tensor.detach() for tensor in tensors if can_be_averaged(tensor)]
    norms = iter(torch.stack(foreach_norm(floating)).tolist() if floating else [])
    return [(version(tensor), float(next(norms)).hex() if can_be_averaged(tensor) else "") for tensor in tensors]


Version = tuple[int, int]  # autograd's counter, and where the values lie


def versions_of(tensors: Sequence[Tensor]) -> list[Version]:
    return [(version(tensor), tensor.data_ptr()) for tensor in tensors]


def written_since(versions: Sequence[Version], tensors: Sequence[Tensor], own_writes: int = 0) -> list[int]:
    """Returns the indices of tensors that were written to since :func:`versions_of`; none if ``versions`` is empty.

    Args:
        own_writes: how often each was written to by who asks.

    Other memory for ``tensor.data`` is a write. Values that are written through it are not seen.
    """
    pairs = zip(versions, versions_of(tensors), strict=True) if versions else ()  # asked before each forward pass
    return [
        index
        for index, ((before, place), (now, place_now)) in enumerate(pairs)
        if now != before + own_writes or place_now != place
    ]


def can_be_averaged(tensor: Tensor) -> bool:
    """Returns whether the values are real numbers of 16 bits or more. 8-bit floats are codes, as integers may be."""
    return tensor.is_floating_point() and tensor.element_size() > 1
