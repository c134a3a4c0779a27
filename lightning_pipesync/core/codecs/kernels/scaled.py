"""Kernels of fp8, int8, int4 and int2."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_pipesync.core.codecs.kernels.chunked_topk import magnitudes_of
from lightning_pipesync.core.codecs.kernels.kernel import (
    KernelShards,
    store_error,
    store_quotient,
    with_residual,
)
from lightning_pipesync.core.codecs.scaled import ScaledChunks


@triton.jit
def product_and(addend: tl.constexpr, values, factor):
    """Returns, in fp64, the exact product and a sum: the CPU contracts both to one instruction."""
    return values.to(tl.float64) * factor.to(tl.float64) + addend


@triton.jit
def by_parts(parts):
    """Returns values of chunks, shape ``[chunks, n]``, from those of their parts, shape ``[chunks, n / 2, 2]``."""
    return tl.reshape(tl.permute(parts, (0, 2, 1)), [parts.shape[0], parts.shape[1] * 2])


@triton.jit
def halves_of(chunks):
    """Returns the first and the second half of each row."""
    return tl.split(tl.permute(tl.reshape(chunks, [chunks.shape[0], 2, chunks.shape[1] // 2]), (0, 2, 1)))


@triton.jit
def encode_kernel(
    source,
    residual,
    scales,
    packed,
    size,
    numel,
    stride,
    LEVELS: tl.constexpr,
    TINY: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    shard = tl.program_id(1).to(tl.int64)
    chunks = tl.program_id(0).to(tl.int64) * CHUNKS + tl.arange(0, CHUNKS)
    columns = chunks[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    offsets = shard * size + columns
    inside = (columns < size) & (offsets < numel)
    values, total = with_residual(source, residual, offsets, inside)
    largest = tl.max(magnitudes_of(values), axis=1).to(tl.float32, bitcast=True)
    scale = tl.div_rn(largest, LEVELS * 1.0)
    scale = (tl.where(scale < TINY, TINY, scale).to(tl.int32, bitcast=True) & -128).to(tl.float32, bitcast=True)
    reciprocal = tl.div_rn(1.0, scale)[:, None]
    if LEVELS == 3:  # no level is zero
        scale = tl.where(scale <= TINY, 0.0, scale)
    tl.store(scales + shard * (stride // 4) + chunks, scale, mask=chunks * CHUNK < size)
    packed += shard * stride
    if LEVELS == 448:
        codes = to_e4m3(values * reciprocal)
        tl.store(packed + columns, codes.to(tl.int8), mask=columns < size)
        rounded = from_e4m3(codes)
    elif LEVELS == 3:
        halves = product_and(2.0, values * 0.5, reciprocal).to(tl.float32)
        codes = (halves >= 1).to(tl.int32) + (halves >= 2).to(tl.int32) + (halves >= 3).to(tl.int32)
        rounded = (2 * codes - 3).to(tl.float32)
        first_half, second_half = halves_of(codes)
        first, second = halves_of(first_half)
        third, fourth = halves_of(second_half)
        places, is_used = bytes_of(chunks, size, CHUNK, 4)
        four = first | second << 2 | third << 4 | fourth << 6
        tl.store(packed + places, four.to(tl.int8), mask=is_used)
    else:
        # Beyond 2**52 fp64 has whole numbers only: the sum is rounded, half to even, to an integer in its lowest bits.
        whole = product_and(6755399441055744.0, values, reciprocal).to(tl.int64, bitcast=True).to(tl.int32)
        rounded = whole.to(tl.float32)
    if LEVELS == 7:
        first, second = halves_of(whole)
        places, is_used = bytes_of(chunks, size, CHUNK, 2)
        tl.store(packed + places, (first + 16 * second).to(tl.int8), mask=is_used)
    if LEVELS == 127:
        tl.store(packed + columns, whole.to(tl.int8), mask=columns < size)
    store_error(residual, offsets, inside, total - rounded * scale[:, None])


@triton.jit
def bytes_of(chunks, size, CHUNK: tl.constexpr, PARTS: tl.constexpr):
    """Returns the places of the bytes of these chunks, and which of them are on the wire: not those behind the last."""
    columns = tl.arange(0, CHUNK // PARTS)[None, :]
    return chunks[:, None] * (CHUNK // PARTS) + columns, chunks[:, None] * CHUNK + columns < size


@triton.jit
def load_wire(scales, packed, chunks, size, LEVELS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Returns the values of these chunks of one wire, shape ``[CHUNKS, CHUNK]``."""
    if LEVELS == 7:
        places, is_used = bytes_of(chunks, size, CHUNK, 2)
        both = tl.load(packed + places, mask=is_used, other=0).to(tl.int32)
        second = (both + 8) >> 4
        numbers = by_parts(tl.join(both - 16 * second, second)).to(tl.float32)
    elif LEVELS == 3:
        places, is_used = bytes_of(chunks, size, CHUNK, 4)
        four = tl.load(packed + places, mask=is_used, other=0).to(tl.int32)
        first_half, second_half = by_parts(tl.join(four, four >> 2)), by_parts(tl.join(four >> 4, four >> 6))
        numbers = (2 * (by_parts(tl.join(first_half, second_half)) & 3) - 3).to(tl.float32)
    else:
        columns = chunks[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        stored = tl.load(packed + columns, mask=columns < size, other=0)
        numbers = from_e4m3(stored) if LEVELS == 448 else stored.to(tl.float32)
    scale = tl.load(scales + chunks, mask=chunks * CHUNK < size, other=0)
    return numbers * scale[:, None]


@triton.jit
def decode_kernel(
    target,
    scales,
    packed,
    size,
    numel,
    stride,
    summed,
    divisor,
    LEVELS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    shard = tl.program_id(1).to(tl.int64)
    chunks = tl.program_id(0).to(tl.int64) * CHUNKS + tl.arange(0, CHUNKS)
    columns = chunks[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    offsets = shard * size + columns
    inside = (columns < size) & (offsets < numel)
    scales += shard * (stride // 4)
    packed += shard * stride
    total = load_wire(scales, packed, chunks, size, LEVELS, CHUNK, CHUNKS)
    for _ in range(1, summed):
        scales += stride // 4
        packed += stride
        total += load_wire(scales, packed, chunks, size, LEVELS, CHUNK, CHUNKS)
    store_quotient(target, offsets, inside, total, divisor)


class ScaledShards(KernelShards):
    codec: ScaledChunks

    def encode(self, flat: Tensor, wires: Tensor, residual: Tensor | None) -> None:
        args = (flat, residual, *self._parts(wires), self.size, flat.numel(), wires.stride(0))
        tiny = torch.finfo(torch.float32).tiny
        self._launch(encode_kernel, self._tiles(self.size), len(wires), *args, **self._constants(), TINY=tiny)

    def _decode(self, wires: Tensor, target: Tensor, shards: int, divisor: int) -> None:
        args = (target, *self._parts(wires), self.size, target.numel(), wires.stride(0), len(wires) // shards)
        self._launch(decode_kernel, self._tiles(self.size), shards, *args, float(divisor), **self._constants())

    def _parts(self, wires: Tensor) -> tuple[Tensor, Tensor]:
        """Returns where the scales and the values of the first wire begin."""
        values = wires.view(torch.int8)[:, self.wire_bytes - self.codec.value_bytes(self.size) :]
        return wires.view(torch.float32), values

    def _constants(self) -> dict[str, float]:
        chunk = self.codec.CHUNK
        return {"LEVELS": self.codec.LEVELS, "CHUNK": chunk, "CHUNKS": self.TILE // chunk}


@triton.jit
def to_e4m3(values):
    """Returns the bits of fp32 values, of magnitudes that round to 448 at most or are NaN, rounded half to even."""
    bits = values.to(tl.int32, bitcast=True)
    magnitudes = bits & 0x7FFFFFFF
    # The exponent's bias changes from 127 to 7; 20 bits of the mantissa are rounded away.
    normal = ((magnitudes + 0x7FFFF + ((magnitudes >> 20) & 1)) >> 20) - 960
    # Below 2**-6 a number is a multiple of 2**-9. Beyond 2**23 fp32 has whole numbers only.
    multiples = (tl.abs(values) * 512.0 + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    codes = tl.where(magnitudes < 0x3C800000, multiples, normal)
    codes = tl.where(values == values, codes, 127)
    return codes | ((bits >> 24) & 128)


@triton.jit
def from_e4m3(codes):
    """Returns the fp32 values of these bits, whose other bits do not count."""
    magnitudes = codes.to(tl.int32) & 127
    normal = ((magnitudes + 960) << 20).to(tl.float32, bitcast=True)
    values = tl.where(magnitudes < 8, magnitudes.to(tl.float32) * 0.001953125, normal)
    values = tl.where(magnitudes == 127, float("nan"), values)
    return tl.where((codes.to(tl.int32) & 128) != 0, -values, values)
