"""Values in memory, as kernels load and store them.

[Note: kernels] A kernel does in one launch, over all shards, what torch operations do in many. Its bits are those of
torch operations on the CPU: quotients are rounded to nearest, wires are summed in their order, and nothing is added
atomically. A product and a sum are contracted where int8, int4 and int2 round values, as torch does on processors that
can, and nowhere else. Torch on CUDA multiplies by a reciprocal instead of dividing, so there the last bits of a scale,
and with it a value by one step, may differ. Which of equal magnitudes top-k keeps, and in which order, may differ too.
The wire format is the same, and every rank decodes the same bytes to the same values, so weights stay equal also where
some ranks have no Triton. Offsets are int64.

Kernels see bfloat16 as int16 and round it by themselves: alike on every device, and in Triton's interpreter, which
would truncate.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_pipesync.core.codecs.shards import Shards


@triton.jit
def widened(stored):
    """Returns values from memory as fp32."""
    if stored.dtype == tl.int16:
        values = (stored.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        values = stored.to(tl.float32)
    return values


@triton.jit
def narrowed(values, dtype: tl.constexpr):
    """Returns fp32 as it is in memory, rounded to nearest, half to even."""
    if dtype == tl.int16:
        bits = tl.where(values == values, values.to(tl.int32, bitcast=True), 0x7FC00000)
        stored = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    else:
        stored = values.to(dtype)
    return stored


@triton.jit
def with_residual(source, residual, offsets, inside):
    """Adds ``residual`` to ``source`` in place; returns the values to be encoded, and the sum before its rounding."""
    values = widened(tl.load(source + offsets, mask=inside, other=0))
    total = values
    if residual is not None:
        total = tl.load(residual + offsets, mask=inside, other=0) + values
        stored = narrowed(total, source.dtype.element_ty)
        tl.store(source + offsets, stored, mask=inside)
        values = widened(stored)
    return values, total


@triton.jit
def store_error(residual, offsets, inside, error):
    """Writes what an encoding has dropped, but zero where that is not finite."""
    if residual is not None:
        tl.store(residual + offsets, tl.where(tl.abs(error) < float("inf"), error, 0.0), mask=inside)


@triton.jit
def store_quotient(target, offsets, inside, total, divisor):
    quotient = tl.div_rn(total, divisor)
    tl.store(target + offsets, narrowed(quotient, target.dtype.element_ty), mask=inside)


class KernelShards(Shards):
    """Shards that Triton kernels encode and decode; see [Note: kernels]."""

    TILE: ClassVar[int] = 4096  #: values that one program works on
    #: A product and a sum, contracted to one instruction, would be rounded once instead of twice.
    OPTIONS: ClassVar[dict[str, Any]] = {"num_warps": 8, "enable_fp_fusion": False}

    def decode(self, wires: Tensor, flat: Tensor) -> None:
        self._decode(wires, flat, len(wires), 1)

    def sum(self, wires: Tensor, own: Tensor, divisor: int) -> None:
        self._decode(wires, own, 1, divisor)

    def sum_in_order(self, wires: Tensor, flat: Tensor, divisor: int) -> None:
        self.sum(wires, flat, divisor)  # a program adds the wires one after the other

    @abstractmethod
    def _decode(self, wires: Tensor, target: Tensor, shards: int, divisor: int) -> None:
        """Decodes to this many shards, each of which is the sum of as many wires over ``divisor``."""

    def _launch(self, kernel: Any, programs: int, shards: int, flat: Tensor, /, *args: Any, **constants: Any) -> None:
        """Launches ``kernel`` for ``flat``, with this many programs for each of the shards, on the current stream."""
        if programs * shards:
            with torch.cuda.device_of(flat):
                kernel[programs, shards](in_memory(flat), *args, **constants, **self.OPTIONS)

    def _tiles(self, numel: int) -> int:
        return triton.cdiv(numel, self.TILE)


def in_memory(values: Tensor) -> Tensor:
    """Returns a view that kernels take: int16 for bfloat16."""
    return values.view(torch.int16) if values.dtype == torch.bfloat16 else values
