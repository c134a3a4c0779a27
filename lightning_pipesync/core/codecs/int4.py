"""Scalar 4-bit quantization."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from lightning_pipesync.core.codecs.blocks import as_dtype, blocks
from lightning_pipesync.core.codecs.codec import Codec


class Int4(Codec):
    """Scalar 4-bit quantization: chunks of 256 values, the last of which may be shorter.

    Wire: for each chunk a scale in fp32, its largest magnitude / 7; then for each value round(value / scale) + 8 in
    four bits, the even one of two neighbors in the low bits. The error is at most half a scale. A chunk with a NaN or
    an infinity decodes to NaNs and infinities everywhere; so does one with magnitudes near the largest fp32 number.
    """

    name = "int4"
    CHUNK: ClassVar[int] = 256

    def wire_bytes(self, numel: int, dtype: torch.dtype) -> int:
        self._require_floating_point(dtype)
        return 4 * self._num_chunks(numel) + -(-numel // 2)

    def encode(self, source: Tensor, wire: Tensor) -> None:
        scales, packed = self._split(wire, source.numel())
        for block, chunks in self._chunked(source):
            scale = scales[chunks]
            rows = as_dtype(source[block], torch.float32).view(scale.numel(), -1)
            torch.maximum(rows.amax(1), rows.amin(1).neg_(), out=scale)
            scale.div_(7).clamp_(min=torch.finfo(torch.float32).tiny)
            scaled = (rows * scale.reciprocal().unsqueeze(1)).round_().clamp_(-7, 7).view(-1)
            nibbles = scaled.add_(8).to(torch.uint8).bitwise_and_(15)
            if nibbles.numel() % 2:
                nibbles = torch.nn.functional.pad(nibbles, (0, 1))
            pairs = nibbles.view(-1, 2)
            target = packed[block.start // 2 : block.start // 2 + pairs.shape[0]]
            torch.bitwise_or(pairs[:, 0], pairs[:, 1] << 4, out=target)

    def decode(self, wire: Tensor, target: Tensor, dtype: torch.dtype) -> None:
        for block, values in self._decoded(wire, target):
            target[block].copy_(values)

    def decode_add(self, wire: Tensor, accumulator: Tensor, dtype: torch.dtype) -> None:
        for block, values in self._decoded(wire, accumulator):
            accumulator[block].add_(values)

    def _decoded(self, wire: Tensor, like: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yields each block and its values in fp32."""
        scales, packed = self._split(wire, like.numel())
        for block, chunks in self._chunked(like):
            numel = block.stop - block.start
            pairs = packed[block.start // 2 : block.start // 2 + -(-numel // 2)]
            nibbles = torch.stack([pairs & 15, pairs >> 4], dim=1).view(-1)[:numel]
            values = nibbles.to(torch.float32).sub_(8)
            values.view(scales[chunks].numel(), -1).mul_(scales[chunks].unsqueeze(1))
            yield block, values

    def _num_chunks(self, numel: int) -> int:
        return -(-numel // self.CHUNK)

    def _split(self, wire: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        scales, packed = wire.split([4 * self._num_chunks(numel), -(-numel // 2)])
        return scales.view(torch.float32), packed

    def _chunked(self, values: Tensor) -> Iterator[tuple[slice, slice]]:
        """Yields which values and which chunks form each block; a last short chunk is a block of its own."""
        whole = values.numel() // self.CHUNK
        for block in blocks(values[: whole * self.CHUNK]):
            yield block, slice(block.start // self.CHUNK, block.stop // self.CHUNK)
        if values.numel() % self.CHUNK:
            yield slice(whole * self.CHUNK, values.numel()), slice(whole, whole + 1)
