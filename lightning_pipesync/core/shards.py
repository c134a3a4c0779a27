"""How a flat buffer is divided among the ranks."""

from __future__ import annotations

import torch
from torch import Tensor


def shard_numel(numel: int, world_size: int) -> int:
    """Returns the number of values of every shard but the last ones, which may be shorter or empty."""
    return -(-numel // world_size)


def shard_slice(numel: int, rank: int, world_size: int) -> slice:
    """Returns which of ``numel`` values ``rank`` owns."""
    size = shard_numel(numel, world_size)
    return slice(min(rank * size, numel), min((rank + 1) * size, numel))


def shard_of(flat: Tensor, rank: int, world_size: int) -> Tensor:
    """Returns the slice of ``flat`` (1-D) that ``rank`` owns: a view."""
    return flat[shard_slice(flat.numel(), rank, world_size)]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the type in which values of ``dtype`` are summed: 16-bit floats in fp32, all else in their own."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
