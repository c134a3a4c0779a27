"""Kernels of the codecs that send one element for each value."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightning_pipesync.core.codecs.elementwise import Truncate16, _Elementwise
from lightning_pipesync.core.codecs.kernels.kernel import (
    KernelShards,
    in_memory,
    narrowed,
    store_error,
    store_quotient,
    widened,
    with_residual,
)


@triton.jit
def encode_kernel(source, residual, elements, size, numel, stride, TRUNCATED: tl.constexpr, TILE: tl.constexpr):
    shard = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    offsets = shard * size + columns
    inside = (columns < size) & (offsets < numel)
    values, total = with_residual(source, residual, offsets, inside)
    if TRUNCATED:
        stored = (values.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
    else:
        stored = narrowed(values, elements.dtype.element_ty)
    tl.store(elements + shard * stride + columns, stored, mask=columns < size)
    store_error(residual, offsets, inside, total - widened(stored))


@triton.jit
def decode_kernel(target, elements, size, numel, stride, summed, divisor, TILE: tl.constexpr):
    shard = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    offsets = shard * size + columns
    inside = (columns < size) & (offsets < numel)
    elements += shard * stride + columns
    total = widened(tl.load(elements, mask=inside, other=0))
    for _ in range(1, summed):
        elements += stride
        total += widened(tl.load(elements, mask=inside, other=0))
    store_quotient(target, offsets, inside, total, divisor)


class ElementwiseShards(KernelShards):
    codec: _Elementwise

    def encode(self, flat: Tensor, wires: Tensor, residual: Tensor | None) -> None:
        elements, stride = self._elements(wires)
        args = (flat, residual, elements, self.size, flat.numel(), stride)
        constants = {"TRUNCATED": isinstance(self.codec, Truncate16), "TILE": self.TILE}
        self._launch(encode_kernel, self._tiles(self.size), len(wires), *args, **constants)

    def _decode(self, wires: Tensor, target: Tensor, shards: int, divisor: int) -> None:
        elements, stride = self._elements(wires)
        args = (target, elements, self.size, target.numel(), stride, len(wires) // shards, float(divisor))
        self._launch(decode_kernel, self._tiles(self.size), shards, *args, TILE=self.TILE)

    def _elements(self, wires: Tensor) -> tuple[Tensor, int]:
        """Returns the elements of the first wire, and how many lie from one wire to the next."""
        elements = in_memory(wires.view(self.codec.element(self.dtype)))
        return elements, elements.stride(0)
