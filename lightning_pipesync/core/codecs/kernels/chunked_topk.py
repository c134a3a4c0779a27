"""Kernels of chunked top-k: a program encodes or decodes one chunk."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_pipesync.core.codecs.kernels.kernel import KernelShards, store_error, store_quotient, with_residual
from lightning_pipesync.core.codecs.sparse import ChunkedTopK

#: A positive number below all that fp32 has.
LESS_THAN_ANY = tl.constexpr(1e-46)


@triton.jit
def encode_kernel(
    source, residual, found, levels, indices, signs, size, numel, stride, CHUNK: tl.constexpr, KEPT: tl.constexpr
):
    """``found`` is memory for what is kept: for each chunk the places, then the values."""
    shard = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, CHUNK)
    columns = chunk * CHUNK + places
    offsets = shard * size + columns
    inside = (columns < size) & (offsets < numel)
    values, total = with_residual(source, residual, offsets, inside)
    magnitudes, searched = magnitudes_of(values), places < CHUNK
    smallest, missing = tl.full([], 0, tl.int32), tl.full([], KEPT, tl.int32)
    for step in tl.static_range(4):
        counts = count_digits(magnitudes, searched, smallest, step)
        smallest, missing = add_digit(smallest, missing, counts, step)
    is_kept, ranks, _ = ranks_of_kept(magnitudes, searched, smallest, missing)
    found += (shard * tl.num_programs(0) + chunk) * (2 * KEPT)
    tl.store(found + ranks - 1, places, mask=is_kept)
    tl.store(found + KEPT + ranks - 1, values.to(tl.int32, bitcast=True), mask=is_kept)
    tl.debug_barrier()  # other threads may have written what this one reads
    each = tl.arange(0, KEPT)
    kept = tl.load(found + KEPT + each).to(tl.float32, bitcast=True)
    exact = tl.abs(kept).to(tl.float64)  # the sum of two numbers may be beyond the range of fp32
    num_moved = tl.sum((exact > 0).to(tl.int32), axis=0)
    has_zeros = num_moved < tl.minimum(KEPT, size - chunk * CHUNK)
    least = tl.where(has_zeros, LESS_THAN_ANY, tl.sum(exact, axis=0) / KEPT)
    is_high = exact >= least
    num_high = tl.sum(is_high.to(tl.int32), axis=0)
    low = tl.sum(tl.where(is_high, 0.0, exact), axis=0) / tl.maximum(KEPT - num_high, 1).to(tl.float64)
    high = tl.sum(tl.where(is_high, exact, 0.0), axis=0) / tl.maximum(num_high, 1).to(tl.float64)
    low, high = low.to(tl.float32), high.to(tl.float32)
    levels += shard * (stride // 4) + chunk * 2
    tl.store(levels, low)
    tl.store(levels + 1, high)
    pairs = tl.arange(0, KEPT // 2)
    even, odd = tl.load(found + 2 * pairs), tl.load(found + 2 * pairs + 1)
    indices += shard * stride + chunk * (KEPT * 3 // 2) + 3 * pairs
    tl.store(indices, (even & 255).to(tl.uint8))
    tl.store(indices + 1, (even >> 8 | (odd & 15) << 4).to(tl.uint8))
    tl.store(indices + 2, (odd >> 4).to(tl.uint8))
    codes = is_high.to(tl.int32) | (kept < 0).to(tl.int32) << 1
    fours = tl.sum(tl.reshape(codes << each % 4 * 2, [KEPT // 4, 4]), axis=1)
    tl.store(signs + shard * stride + chunk * (KEPT // 4) + tl.arange(0, KEPT // 4), fours.to(tl.uint8))
    if residual is not None:
        decoded = tl.where(tl.abs(values).to(tl.float64) >= least, high, low)
        decoded = tl.where(is_kept, tl.where(values < 0, -decoded, decoded), 0.0)
        store_error(residual, offsets, inside, total - decoded)


@triton.jit
def decode_kernel(
    target, sums, levels, indices, signs, size, numel, stride, summed, divisor, CHUNK: tl.constexpr, KEPT: tl.constexpr
):
    """``sums`` is memory for the sums in fp32; it may be the target itself."""
    shard = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0).to(tl.int64)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = (columns < size) & (shard * size + columns < numel)
    target += shard * size
    sums += shard * size
    tl.store(sums + columns, tl.zeros([CHUNK], tl.float32), mask=inside)
    each = tl.arange(0, KEPT)
    levels += shard * (stride // 4) + chunk * 2
    indices += shard * stride + chunk * (KEPT * 3 // 2) + each // 2 * 3 + each % 2
    signs += shard * stride + chunk * (KEPT // 4) + each // 4
    for _ in range(summed):
        first, second = tl.load(indices).to(tl.int32), tl.load(indices + 1).to(tl.int32)
        index = tl.where(each % 2 == 0, first | (second & 15) << 8, first >> 4 | second << 4)
        code = tl.load(signs).to(tl.int32) >> each % 4 * 2
        value = tl.where((code & 1) == 1, tl.load(levels + 1), tl.load(levels))
        value = tl.where((code & 2) == 2, -value, value)
        kept = chunk * CHUNK + index
        kept_inside = (kept < size) & (shard * size + kept < numel)
        tl.debug_barrier()  # other threads may have written these sums
        tl.store(sums + kept, tl.load(sums + kept, mask=kept_inside, other=0.0) + value, mask=kept_inside)
        levels += stride // 4
        indices += stride
        signs += stride
    tl.debug_barrier()
    total = tl.load(sums + columns, mask=inside, other=0.0)
    store_quotient(target, columns, inside, total, divisor)


class ChunkedTopKShards(KernelShards):
    codec: ChunkedTopK

    def encode(self, flat: Tensor, wires: Tensor, residual: Tensor | None) -> None:
        shape = (len(wires), self._chunks(), 2, self.codec.k)
        found = torch.empty(shape, dtype=torch.int32, device=flat.device)
        args = (flat, residual, found, *self._parts(wires), self.size, flat.numel(), wires.stride(0))
        self._launch(encode_kernel, self._chunks(), len(wires), *args, **self._constants())

    def _decode(self, wires: Tensor, target: Tensor, shards: int, divisor: int) -> None:
        sums = target if target.dtype == torch.float32 else torch.empty_like(target, dtype=torch.float32)
        args = (target, sums, *self._parts(wires), self.size, target.numel(), wires.stride(0))
        summed = len(wires) // shards
        self._launch(decode_kernel, self._chunks(), shards, *args, summed, float(divisor), **self._constants())

    def _parts(self, wires: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns where the levels, the indices and the signs of the first wire begin."""
        levels, indices, _ = self.codec.sections(self.size)
        return wires.view(torch.float32), wires[:, levels:], wires[:, levels + indices :]

    def _chunks(self) -> int:
        return triton.cdiv(self.size, self.codec.CHUNK)

    def _constants(self) -> dict[str, int]:
        return {"CHUNK": self.codec.CHUNK, "KEPT": self.codec.k}


@triton.jit
def magnitudes_of(values):
    """Returns magnitudes as whole numbers in the same order; a NaN's is the largest."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def count_digits(magnitudes, searched, smallest, STEP: tl.constexpr):
    """Counts the next 8 bits of magnitudes, from the highest, of those whose bits before are those of ``smallest``."""
    if STEP > 0:
        searched = searched & ((magnitudes >> (32 - 8 * STEP)) == (smallest >> (32 - 8 * STEP)))
    return tl.histogram((magnitudes >> (24 - 8 * STEP)) & 255, 256, mask=searched)


@triton.jit
def add_digit(smallest, missing, counts, STEP: tl.constexpr):
    """Adds a digit to the smallest magnitude that is kept; of those that begin as it does, ``missing`` are kept."""
    digits = tl.arange(0, 256)
    at_least = tl.cumsum(counts, axis=0, reverse=True)
    digit = tl.max(tl.where(at_least >= missing, digits, 0), axis=0)
    missing -= tl.sum(tl.where(digits > digit, counts, 0), axis=0)
    return smallest | (digit << (24 - 8 * STEP)), missing


@triton.jit
def ranks_of_kept(magnitudes, searched, smallest, missing):
    """Returns which are kept, of equal ones the first; how many up to each place; and which are equal to `smallest`."""
    is_equal = searched & (magnitudes == smallest)
    kept = is_equal & (tl.cumsum(is_equal.to(tl.int32), axis=0) <= missing)
    kept = kept | (searched & (magnitudes > smallest))
    return kept, tl.cumsum(kept.to(tl.int32), axis=0), is_equal
