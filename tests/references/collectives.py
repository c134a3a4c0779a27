"""What collectives make of the ranks' values, by hand: sums in the order of the ranks, of a ring, of a torus."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_pipesync.core.buckets import shard_of

SIZES = [0, 1, 2, 3, 5, 64, 1000, 4097, 10_007]  # larger ones take the ring on 3 ranks
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32]
LOSSY = ["bf16", "fp16", "truncate16", "fp8", "int8", "int4", "int2", "topk", "chunked_topk"]
BROADCAST = [torch.bool, torch.int16, torch.uint16, torch.float8_e4m3fn, torch.complex64, torch.bfloat16]


def values(numel: int, dtype: torch.dtype, rank: int, round_: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * numel + 100 * round_ + rank)
    return (torch.randn(numel, generator=generator) * 10).to(dtype)


def of_ranks(numel: int, world_size: int, dtype: torch.dtype = torch.float32, round_: int = 0) -> list[Tensor]:
    return [values(numel, dtype, rank, round_) for rank in range(world_size)]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a sum."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def in_order(tensors: list[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def rank_order_sum(numel: int, dtype: torch.dtype, world_size: int) -> Tensor:
    """What every rank must get: fp32 sums (fp64, integers in their own type) in the order of the ranks."""
    return in_order([one.to(wide(dtype)) for one in of_ranks(numel, world_size, dtype)]).to(dtype)


def ring_order_sum(numel: int, world_size: int) -> Tensor:
    """Each slice starts at the rank after its owner; the owner adds its values last."""
    total = torch.empty(numel)
    for owner in range(world_size):
        ranks = [(owner + 1 + step) % world_size for step in range(world_size)]
        slices = [shard_of(values(numel, torch.float32, rank), owner, world_size) for rank in ranks]
        shard_of(total, owner, world_size).copy_(in_order(slices))
    return total


def sum_by_rows_and_columns(numel: int, world_size: int, columns: int) -> Tensor:
    """Each row by itself, and then the rows; from rank 0 on."""
    one = of_ranks(numel, world_size)
    return in_order([in_order(one[first : first + columns]) for first in range(0, world_size, columns)])
