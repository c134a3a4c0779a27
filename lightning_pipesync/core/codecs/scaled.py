"""Quantization: chunks of values, each with a scale in fp32."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from lightning_pipesync.core.codecs.blocks import as_dtype, blocks, scratch, works_in_blocks
from lightning_pipesync.core.codecs.codec import Codec


class ScaledChunks(Codec):
    """Chunks of ``CHUNK`` values, the last of which may be shorter, as numbers from ``-LEVELS`` to ``LEVELS`` scales.

    Wire: for each chunk its scale, its largest magnitude / ``LEVELS``, and never below the smallest normal fp32 number;
    then the values in a whole number of bytes.
    """

    CHUNK: ClassVar[int]
    LEVELS: ClassVar[float]

    @abstractmethod
    def value_bytes(self, numel: int) -> int:
        """Returns the bytes of the quantized values."""

    @abstractmethod
    def pack(self, scaled: Tensor, packed: Tensor) -> None:
        """Rounds values in fp32, of which a scale is 1, and writes them to bytes; ``scaled`` may change."""

    @abstractmethod
    def unpack(self, packed: Tensor, values: Tensor) -> None:
        """Overwrites fp32 ``values`` with the numbers in these bytes."""

    def wire_bytes(self, numel: int, dtype: torch.dtype) -> int:
        self._require_floating_point(dtype)
        return 4 * self._num_chunks(numel) + self.value_bytes(numel)

    def encode(self, source: Tensor, wire: Tensor) -> None:
        for block, scale, packed in self._blocks(source, wire):
            values = as_dtype(source[..., block], torch.float32)
            chunks = self._padded(values, scale).unflatten(-1, (scale.shape[-1], -1))
            # amax and amin are several times faster than an infinity norm, and also keep a NaN.
            torch.maximum(chunks.amax(-1), chunks.amin(-1).neg_(), out=scale)
            scale.div_(self.LEVELS).clamp_(min=torch.finfo(torch.float32).tiny)
            # If the values are scratch themselves, this is the same memory, and the multiplication is in place.
            scaled = scratch(chunks, torch.float32)
            torch.mul(chunks, scale.reciprocal().unsqueeze(-1), out=scaled)
            self.pack(scaled.flatten(-2)[..., : values.shape[-1]], packed)

    def decode(self, wire: Tensor, target: Tensor, dtype: torch.dtype) -> None:
        for block, scale, packed in self._blocks(target, wire):
            into = target[..., block]
            values = self._decoded(scale, packed, into if into.dtype == torch.float32 else scratch(into, torch.float32))
            if values is not into:
                into.copy_(values)

    def decode_add(self, wire: Tensor, accumulator: Tensor, dtype: torch.dtype, alpha: float = 1) -> None:
        for block, scale, packed in self._blocks(accumulator, wire):
            values = scratch(accumulator[..., block], torch.float32)
            accumulator[..., block].add_(self._decoded(scale, packed, values), alpha=alpha)

    def _decoded(self, scale: Tensor, packed: Tensor, values: Tensor) -> Tensor:
        self.unpack(packed, values)
        scales = scale.unsqueeze(-1)
        if self._missing(values, scale):
            return values.mul_(scales.expand(*scale.shape, self.CHUNK).flatten(-2)[..., : values.shape[-1]])
        values.unflatten(-1, (scale.shape[-1], -1)).mul_(scales)
        return values

    def _padded(self, values: Tensor, scale: Tensor) -> Tensor:
        missing = self._missing(values, scale)
        return torch.nn.functional.pad(values, (0, missing)) if missing else values

    def _missing(self, values: Tensor, scale: Tensor) -> int:
        """Returns how many values a last short chunk lacks; a block of one chunk is whole."""
        return scale.shape[-1] * self.CHUNK - values.shape[-1] if scale.shape[-1] > 1 else 0

    def _num_chunks(self, numel: int) -> int:
        return -(-numel // self.CHUNK)

    def _blocks(self, values: Tensor, wire: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yields which values form each block, their scales and their bytes.

        Where they are several, a last short chunk is its own block.
        """
        numel = values.shape[-1]
        scales, packed = wire.split([4 * self._num_chunks(numel), self.value_bytes(numel)], dim=-1)
        whole = numel // self.CHUNK * self.CHUNK if works_in_blocks(values) else numel
        for block in [*blocks(values[..., :whole]), slice(whole, numel)]:
            if block.start < block.stop:
                chunks = slice(block.start // self.CHUNK, self._num_chunks(block.stop))
                place = slice(self.value_bytes(block.start), self.value_bytes(block.stop))
                yield block, scales.view(torch.float32)[..., chunks], packed[..., place]


def pack_two_bits(numbers: Tensor, packed: Tensor) -> None:
    """Writes numbers from 0 to 3, uint8, to bytes, the first of four in the lowest bits; zeros follow the last."""
    if missing := -numbers.shape[-1] % 4:
        numbers = torch.nn.functional.pad(numbers, (0, missing))
    first, second, third, fourth = (numbers[..., place::4] << 2 * place for place in range(4))
    torch.bitwise_or(first | second, third | fourth, out=packed)


def unpack_two_bits(packed: Tensor) -> Tensor:
    """Returns the numbers in these bytes, uint8, four of each."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-1) >> shifts).flatten(-2) & 3


class Int8(ScaledChunks):
    """Scalar 8-bit quantization (Pipe-SGD, Compression): chunks of 1024 values, the last of which may be shorter.

    Wire: for each chunk a scale in fp32, its largest magnitude / 127; then for each value round(value / scale) in int8.
    The error is at most half a scale. The scale is never below the smallest normal fp32 number, so a chunk of
    subnormals rounds to zero or to that. A chunk with a NaN or an infinity decodes to NaNs and infinities everywhere;
    the largest fp32 number itself counts as an infinity, because 127 scales may exceed it.
    """

    name = "int8"
    CHUNK = 1024
    LEVELS = 127

    def value_bytes(self, numel: int) -> int:
        return numel

    def pack(self, scaled: Tensor, packed: Tensor) -> None:
        packed.view(torch.int8).copy_(scaled.round_())

    def unpack(self, packed: Tensor, values: Tensor) -> None:
        values.copy_(packed.view(torch.int8))


class Int4(ScaledChunks):
    """Scalar 4-bit quantization: chunks of 256 values, the last of which may be shorter.

    Wire: for each chunk a scale in fp32, its largest magnitude / 7; then for each value round(value / scale) + 8 in
    four bits, the even one of two neighbors in the low bits. The error is at most half a scale. A chunk with a NaN or
    an infinity decodes to NaNs and infinities everywhere; so does one with magnitudes near the largest fp32 number.
    """

    name = "int4"
    CHUNK = 256
    LEVELS = 7

    def value_bytes(self, numel: int) -> int:
        return -(-numel // 2)

    def pack(self, scaled: Tensor, packed: Tensor) -> None:
        nibbles = scaled.round_().clamp_(-self.LEVELS, self.LEVELS).add_(8).to(torch.uint8).bitwise_and_(15)
        if nibbles.shape[-1] % 2:
            nibbles = torch.nn.functional.pad(nibbles, (0, 1))
        torch.bitwise_or(nibbles[..., 0::2], nibbles[..., 1::2] << 4, out=packed)

    def unpack(self, packed: Tensor, values: Tensor) -> None:
        nibbles = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)[..., : values.shape[-1]]
        values.copy_(nibbles).sub_(8)


class Int2(ScaledChunks):
    """Linear 2-bit quantization (MuLoCo): chunks of 256 values, the last of which may be shorter.

    Wire: for each chunk a scale in fp32, its largest magnitude / 1.5; then for each value round(value / scale + 1.5),
    which is 0 to 3, in two bits, the first of four neighbors in the lowest. So a value decodes to the largest magnitude
    of its chunk or to a third of it, with either sign, and the error is at most a third. No level is zero, but a chunk
    of zeros, or of subnormals, has a scale of zero. Use it with error feedback. A chunk with a NaN or an infinity
    decodes to NaNs and infinities everywhere; so does one with magnitudes near the largest fp32 number. Where the
    processor flushes denormals, a chunk with a magnitude above 1.27e38 loses its signs.
    """

    name = "int2"
    CHUNK = 256
    LEVELS = 1.5
    reach = CHUNK - 1

    def value_bytes(self, numel: int) -> int:
        return -(-numel // 4)

    def encode(self, source: Tensor, wire: Tensor) -> None:
        super().encode(source, wire)
        for _, scale, _ in self._blocks(source, wire):
            scale.masked_fill_(scale <= torch.finfo(torch.float32).tiny, 0.0)

    def pack(self, scaled: Tensor, packed: Tensor) -> None:
        codes = scaled.add_(self.LEVELS).round_().clamp_(0, 3).to(torch.uint8).bitwise_and_(3)
        pack_two_bits(codes, packed)

    def unpack(self, packed: Tensor, values: Tensor) -> None:
        values.copy_(unpack_two_bits(packed)[..., : values.shape[-1]]).sub_(self.LEVELS)


class FP8(ScaledChunks):
    """8-bit floating point (e4m3: 4 bits of exponent, 3 of mantissa): chunks of 1024 values, the last may be shorter.

    Wire: for each chunk a scale in fp32, its largest magnitude / 448, the largest number of e4m3; then for each value
    value / scale in e4m3, rounded to nearest. The relative error is at most 2^-4 down to 2^-6 scales, and below that
    the error is at most 2^-10 scales: less than that of int8 for the many small values of a gradient, more for the few
    large ones. The scale is never below the smallest normal fp32 number. A chunk with a NaN or an infinity decodes to
    NaNs everywhere; values near the largest fp32 number may become infinite.
    """

    name = "fp8"
    CHUNK = 1024
    LEVELS = 448

    def value_bytes(self, numel: int) -> int:
        return numel

    def pack(self, scaled: Tensor, packed: Tensor) -> None:
        packed.view(torch.float8_e4m3fn).copy_(scaled)

    def unpack(self, packed: Tensor, values: Tensor) -> None:
        values.copy_(packed.view(torch.float8_e4m3fn))
