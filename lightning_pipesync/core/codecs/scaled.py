"""Quantization: chunks of values, each with a scale in fp32."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from lightning_pipesync.core.codecs.blocks import blocks, scratch
from lightning_pipesync.core.codecs.codec import Codec

TINY = torch.finfo(torch.float32).tiny
MAGIC = 1.5 * 2**23
"""Beyond 2**23 fp32 has whole numbers only: a sum with this one is rounded to one, which its lowest bits are."""


def operand(number: float, dtype: torch.dtype) -> Tensor:
    """Returns a number for operations on any device, which take 2 us less than with a number of Python's."""
    return torch.tensor(number, dtype=dtype, device="cpu")


TWO, THREE, FOUR, EIGHT = (operand(number, torch.int8) for number in (2, 3, 4, 8))
SIGNIFICAND_17, LOWEST_TWO_BITS = (operand(number, torch.int32) for number in (-128, 0x03030303))
EIGHTH_BIT, SIGN_AND_E4M3 = (operand(number, torch.int16) for number in (128, 0x3F80 - 0x8000))
FP16_BIAS = operand(2**8, torch.float32)


class ScaledChunks(Codec):
    """Chunks of ``CHUNK`` values, the last of which may be shorter, as numbers from ``-LEVELS`` to ``LEVELS`` scales.

    Wire: for each chunk its scale, its largest magnitude / ``LEVELS``, and never below the smallest normal fp32 number,
    without the 7 lowest bits, so that all products with it are exact; then the bytes of each chunk. Their n-th one
    holds the n-th value of each of the ``PARTS`` equal parts of the chunk. A last short chunk is encoded as if zeros
    followed; bytes of nothing but these are left out.
    """

    CHUNK: ClassVar[int]
    LEVELS: ClassVar[float]
    PARTS: ClassVar[int] = 1

    @abstractmethod
    def pack(self, chunks: Tensor, reciprocal: Tensor, packed: Tensor) -> None:
        """Rounds ``chunks`` times ``reciprocal``, of which a scale is 1, and writes them to the bytes of chunks."""

    @abstractmethod
    def unpack(self, packed: Tensor, scale: Tensor, chunks: Tensor) -> Tensor:
        """Overwrites ``chunks`` with the numbers in these bytes, and returns what they are to be multiplied by."""

    def value_bytes(self, numel: int) -> int:
        """Returns the bytes of the quantized values."""
        chunk_bytes = self.CHUNK // self.PARTS
        return numel // self.CHUNK * chunk_bytes + min(numel % self.CHUNK, chunk_bytes)

    def wire_bytes(self, numel: int, dtype: torch.dtype) -> int:
        self._require_floating_point(dtype)
        return 4 * self._num_chunks(numel) + self.value_bytes(numel)

    def encode(self, source: Tensor, wire: Tensor) -> None:
        for values, scale, packed in self._blocks(source, wire):
            chunks = whole_chunks(values, self.CHUNK, torch.float32)
            # amax and amin are several times faster than an infinity norm, and also keep a NaN.
            torch.maximum(chunks.amax(-1, True), chunks.amin(-1, True).neg_(), out=scale)
            scale.div_(self.LEVELS).clamp_min_(TINY).view(torch.int32).bitwise_and_(SIGNIFICAND_17)
            all_packed = whole_chunks(packed, self.CHUNK // self.PARTS, torch.uint8)
            self.pack(chunks, scale.reciprocal(), all_packed)
            copy_back(all_packed, packed)

    def decode(self, wire: Tensor, target: Tensor, dtype: torch.dtype) -> None:
        for values, scale, packed in self._blocks(target, wire):
            chunks = whole_chunks(values, self.CHUNK, torch.float32, filled=False)
            chunks.mul_(self._unpacked(packed, scale, chunks))
            copy_back(chunks, values)

    def decode_add(self, wire: Tensor, accumulator: Tensor, dtype: torch.dtype, alpha: float = 1) -> None:
        for values, scale, packed in self._blocks(accumulator, wire):
            chunks = scratch((*scale.shape[:-1], self.CHUNK), torch.float32, values.device)
            factor = self._unpacked(packed, scale, chunks)
            if is_whole(values, chunks) and abs(alpha) == 1:
                values.view(chunks.shape).addcmul_(chunks, factor, value=alpha)  # one pass: the products are exact
            else:
                values.add_(chunks.mul_(factor).flatten(-2)[..., : values.shape[-1]], alpha=alpha)

    def _unpacked(self, packed: Tensor, scale: Tensor, chunks: Tensor) -> Tensor:
        return self.unpack(whole_chunks(packed, self.CHUNK // self.PARTS, torch.uint8), scale, chunks)

    def _num_chunks(self, numel: int) -> int:
        return -(-numel // self.CHUNK)

    def _scales(self, wire: Tensor, numel: int) -> Tensor:
        return wire[..., : 4 * self._num_chunks(numel)].view(torch.float32).unsqueeze(-1)

    def _blocks(self, values: Tensor, wire: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yields the values of each block, their scales, shape ``[..., chunks, 1]``, and their bytes."""
        numel = values.shape[-1]
        scales, packed = self._scales(wire, numel), wire[..., 4 * self._num_chunks(numel) :]
        for block in blocks(values):
            if block.stop - block.start == numel:  # a small tensor, for which three slices take long
                yield values, scales, packed
                return
            chunks = slice(block.start // self.CHUNK, self._num_chunks(block.stop))
            place = slice(self.value_bytes(block.start), self.value_bytes(block.stop))
            yield values[..., block], scales[..., chunks, :], packed[..., place]


def is_whole(flat: Tensor, chunks: Tensor) -> bool:
    """Returns whether ``flat`` is what whole chunks are, but for its shape."""
    return flat.dtype == chunks.dtype and flat.numel() == chunks.numel()


def whole_chunks(flat: Tensor, size: int, dtype: torch.dtype, filled: bool = True) -> Tensor:
    """Returns whole chunks, shape ``[..., chunks, size]``: of ``flat`` itself, or in scratch, padded with zeros."""
    numel = flat.shape[-1]
    if flat.dtype != dtype or numel % size:
        padded = scratch((*flat.shape[:-1], -(-numel // size) * size), dtype, flat.device)
        if filled:
            padded[..., :numel].copy_(flat)
            padded[..., numel:].zero_()
        flat = padded
    return flat.unflatten(-1, (-1, size))


def copy_back(chunks: Tensor, flat: Tensor) -> None:
    """Copies whole chunks to ``flat``, if they are not that already."""
    if not is_whole(flat, chunks):
        flat.copy_(chunks.flatten(-2)[..., : flat.shape[-1]])


def rounded(chunks: Tensor, reciprocal: Tensor) -> Tensor:
    """Returns int32 whose lowest bytes are ``chunks`` times ``reciprocal``, rounded half to even."""
    return multiplied_and_added(chunks, reciprocal, 1, MAGIC).view(torch.int32)


def multiplied_and_added(chunks: Tensor, reciprocal: Tensor, factor: float, addend: float) -> Tensor:
    """Returns ``factor * chunks * reciprocal + addend`` in scratch, in one pass; processors may round but the sum."""
    # Beside a factor for each chunk, one addend that is not a row would make addcmul five times slower.
    row, sums = chunks.new_full(chunks.shape[-1:], addend), scratch(chunks.shape, torch.float32, chunks.device)
    return torch.addcmul(row, chunks, reciprocal, value=factor, out=sums)


def parts_of(chunks: Tensor, number: int) -> tuple[Tensor, ...]:
    """Returns the equal parts of each chunk, shapes ``[..., chunks, n / number]``."""
    return chunks.unflatten(-1, (number, -1)).unbind(-2)


class Int8(ScaledChunks):
    """Scalar 8-bit quantization (Pipe-SGD, Compression): chunks of 1024 values, the last of which may be shorter.

    Wire: for each chunk a scale in fp32, its largest magnitude / 127; then for each value round(value / scale) in int8.
    The error is at most half a scale. The scale is never below the smallest normal fp32 number, so a chunk of
    subnormals rounds to zero or to that. A chunk with a NaN or an infinity decodes to NaNs and infinities everywhere.
    """

    name = "int8"
    CHUNK = 1024
    LEVELS = 127

    def pack(self, chunks: Tensor, reciprocal: Tensor, packed: Tensor) -> None:
        packed.copy_(rounded(chunks, reciprocal))

    def unpack(self, packed: Tensor, scale: Tensor, chunks: Tensor) -> Tensor:
        chunks.copy_(packed.view(torch.int8))
        return scale


class Int4(ScaledChunks):
    """Scalar 4-bit quantization: chunks of 256 values, the last of which may be shorter.

    Wire: for each chunk a scale in fp32, its largest magnitude / 7; then in the n-th byte of a chunk, of the n-th value
    of its first half and that of its second, round(first / scale) + 16 round(second / scale) in int8. The error is at
    most half a scale. A chunk with a NaN or an infinity decodes to NaNs and infinities everywhere.
    """

    name = "int4"
    CHUNK = 256
    LEVELS = 7
    PARTS = 2

    def pack(self, chunks: Tensor, reciprocal: Tensor, packed: Tensor) -> None:
        numbers = scratch(chunks.shape, torch.int8, chunks.device).copy_(rounded(chunks, reciprocal))
        first, second = parts_of(numbers, 2)
        torch.add(first, second, alpha=16, out=packed.view(torch.int8))

    def unpack(self, packed: Tensor, scale: Tensor, chunks: Tensor) -> Tensor:
        numbers, packed = scratch(chunks.shape, torch.int8, chunks.device), packed.view(torch.int8)
        first, second = parts_of(numbers, 2)
        torch.add(packed, EIGHT, out=second).bitwise_right_shift_(FOUR)
        torch.sub(packed, second, alpha=16, out=first)
        chunks.copy_(numbers)
        return scale


class Int2(ScaledChunks):
    """Linear 2-bit quantization (MuLoCo): chunks of 256 values, the last of which may be shorter.

    Wire: for each chunk a scale in fp32, a third of its largest magnitude; then for each value which of -3, -1, 1 and 3
    scales is nearest, as 0 to 3, in two bits: those of the first quarter of the chunk in the lowest bits of its bytes.
    So a value decodes to the largest magnitude of its chunk or to a third of it, with either sign, and the error is at
    most a third. No level is zero, but a chunk of zeros, or of subnormals, has a scale of zero. Use it with error
    feedback. A chunk with a NaN or an infinity decodes to NaNs and infinities everywhere. Where the processor flushes
    denormals, a chunk with a magnitude above 2.5e38 loses its signs.
    """

    name = "int2"
    CHUNK = 256
    LEVELS = 3
    PARTS = 4
    reach = CHUNK - 1

    def encode(self, source: Tensor, wire: Tensor) -> None:
        super().encode(source, wire)
        torch.threshold_(self._scales(wire, source.shape[-1]), TINY, 0.0)

    def pack(self, chunks: Tensor, reciprocal: Tensor, packed: Tensor) -> None:
        codes = scratch(chunks.shape, torch.int8, chunks.device)
        codes.copy_(multiplied_and_added(chunks, reciprocal, 0.5, 2))  # which truncates
        first, second, third, fourth = parts_of(codes, 4)
        first.add_(second, alpha=4)
        third.add_(fourth, alpha=4)
        torch.add(first, third, alpha=16, out=packed.view(torch.int8))

    def unpack(self, packed: Tensor, scale: Tensor, chunks: Tensor) -> Tensor:
        codes = scratch(chunks.shape, torch.int8, chunks.device)
        shifts = torch.arange(0, 8, 2, dtype=torch.int32, device=packed.device).unsqueeze(-1)
        words, parts = packed.view(torch.int32).unsqueeze(-2), codes.view(torch.int32).unflatten(-1, (4, -1))
        torch.bitwise_right_shift(words, shifts, out=parts).bitwise_and_(LOWEST_TWO_BITS)
        chunks.copy_(codes.mul_(TWO).sub_(THREE))
        return scale


class FP8(ScaledChunks):
    """8-bit floating point (e4m3: 4 bits of exponent, 3 of mantissa): chunks of 1024 values, the last may be shorter.

    Wire: for each chunk a scale in fp32, its largest magnitude / 448, the largest number of e4m3; then for each value
    value / scale in e4m3, rounded to nearest. The relative error is at most 2^-4 down to 2^-6 scales, and below that
    the error is at most 2^-10 scales: less than that of int8 for the many small values of a gradient, more for the few
    large ones. The scale is never below the smallest normal fp32 number. A chunk with a NaN or an infinity decodes to
    NaNs and infinities everywhere.
    """

    name = "fp8"
    CHUNK = 1024
    LEVELS = 448

    def pack(self, chunks: Tensor, reciprocal: Tensor, packed: Tensor) -> None:
        scaled = scratch(chunks.shape, torch.float32, chunks.device)
        packed.view(torch.float8_e4m3fn).copy_(torch.mul(chunks, reciprocal, out=scaled))

    def unpack(self, packed: Tensor, scale: Tensor, chunks: Tensor) -> Tensor:
        # torch's conversion is ten times slower. The bits are those of fp16 with fewer zeros, of 2**8 times the value.
        halves = scratch(chunks.shape, torch.int16, chunks.device).copy_(packed.view(torch.int8))
        chunks.copy_(halves.mul_(EIGHTH_BIT).bitwise_and_(SIGN_AND_E4M3).view(torch.float16))
        return scale * FP16_BIAS
