"""Kernels of top-k: one program searches a shard."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_pipesync.core.codecs.kernels.kernel_shards import KernelShards
from lightning_pipesync.core.codecs.kernels.search import add_digit, count_digits, magnitudes_of, ranks_of_kept
from lightning_pipesync.core.codecs.kernels.values import (
    narrowed,
    store_error,
    store_quotient,
    widened,
    with_residual,
)
from lightning_pipesync.core.codecs.topk import TopK


@triton.jit
def add_residual_kernel(source, residual, numel, TILE: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = offsets < numel
    _, total = with_residual(source, residual, offsets, inside)
    store_error(residual, offsets, inside, total)


@triton.jit
def encode_kernel(source, residual, wire, size, numel, stride, num_kept, TILE: tl.constexpr):
    """Finds the smallest magnitude of a shard that is kept; then writes what is kept, in order."""
    shard = tl.program_id(1).to(tl.int64)
    places = tl.arange(0, TILE)
    end = tl.full([], 0, tl.int64) + size
    smallest = tl.full([], 0, tl.int32)
    missing = tl.full([], 0, tl.int32) + num_kept
    for step in tl.static_range(4):
        counts = tl.zeros([256], tl.int32)
        for start in range(0, end, TILE):
            columns = start + places
            offsets = shard * size + columns
            values = widened(tl.load(source + offsets, mask=(columns < size) & (offsets < numel), other=0))
            counts += count_digits(magnitudes_of(values), columns < size, smallest, step)
        smallest, missing = add_digit(smallest, missing, counts, step)
    wire += shard * stride
    written = tl.full([], 0, tl.int32)
    for start in range(0, end, TILE):
        columns = start + places
        offsets = shard * size + columns
        inside = (columns < size) & (offsets < numel)
        values = widened(tl.load(source + offsets, mask=inside, other=0))
        kept, ranks, is_equal = ranks_of_kept(magnitudes_of(values), columns < size, smallest, missing)
        index = written + ranks - 1
        tl.store(wire + index, columns.to(tl.int32), mask=kept)
        tl.store(wire + num_kept + index, values.to(tl.int32, bitcast=True), mask=kept)
        if residual is not None:
            dropped = inside & kept
            total = tl.load(residual + offsets, mask=dropped, other=0.0)
            store_error(residual, offsets, dropped, total - values)
        missing -= tl.sum(is_equal.to(tl.int32), axis=0)
        written += tl.sum(kept.to(tl.int32), axis=0)


@triton.jit
def scatter_kernel(target, wire, size, numel, stride, num_kept, TILE: tl.constexpr):
    """The indices of a wire differ, so each place of the target is written once at most."""
    shard = tl.program_id(1).to(tl.int64)
    places = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    wire += shard * stride + places
    index = tl.load(wire, mask=places < num_kept, other=0)
    values = tl.load(wire + num_kept, mask=places < num_kept, other=0).to(tl.float32, bitcast=True)
    offsets = shard * size + index
    inside = (places < num_kept) & (offsets < numel)
    tl.store(target + offsets, narrowed(values, target.dtype.element_ty), mask=inside)


@triton.jit
def sum_kernel(target, rows, size, numel, summed, divisor, TILE: tl.constexpr):
    columns = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (columns < size) & (columns < numel)
    rows += columns
    total = tl.load(rows, mask=inside, other=0.0)
    for _ in range(1, summed):
        rows += size
        total += tl.load(rows, mask=inside, other=0.0)
    store_quotient(target, columns, inside, total, divisor)


class TopKShards(KernelShards):
    # One program reads a whole shard: as many loads at once as registers allow.
    TILE = 8192
    OPTIONS: ClassVar[dict[str, Any]] = {**KernelShards.OPTIONS, "num_warps": 16}
    codec: TopK

    def encode(self, flat: Tensor, wires: Tensor, residual: Tensor | None) -> None:
        if residual is not None:
            tiles = self._tiles(flat.numel())
            self._launch(add_residual_kernel, tiles, 1, flat, residual, flat.numel(), TILE=self.TILE)
        wire, stride, num_kept = self._wire(wires)
        args = (flat, residual, wire, self.size, flat.numel(), stride, num_kept)
        self._launch(encode_kernel, min(self.size, 1), len(wires), *args, TILE=self.TILE)

    def decode(self, wires: Tensor, flat: Tensor) -> None:
        wire, stride, num_kept = self._wire(wires)
        args = (flat.zero_(), wire, self.size, flat.numel(), stride, num_kept)
        self._launch(scatter_kernel, self._tiles(num_kept), len(wires), *args, TILE=self.TILE)

    def sum(self, wires: Tensor, own: Tensor, divisor: int) -> None:
        rows = torch.empty(len(wires) * self.size, device=self.device)
        self.decode(wires, rows)
        args = (own, rows, self.size, own.numel(), len(wires), float(divisor))
        self._launch(sum_kernel, self._tiles(self.size), 1, *args, TILE=self.TILE)

    def _wire(self, wires: Tensor) -> tuple[Tensor, int, int]:
        """Returns the first wire as int32, how many of them lie from one wire to the next, and how many are kept."""
        return wires.view(torch.int32), wires.stride(0) // 4, self.codec.num_kept(self.size)
