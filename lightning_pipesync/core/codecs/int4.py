"""Scalar 4-bit quantization."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_pipesync.core.codecs.blocks import as_dtype
from lightning_pipesync.core.codecs.scaled import ScaledChunks


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

    def encode(self, source: Tensor, wire: Tensor) -> None:
        scales, packed = self._split(wire, source.numel())
        for block, chunks in self._chunked(source):
            scale = scales[chunks]
            rows = as_dtype(source[block], torch.float32).view(scale.numel(), -1)
            self._set_scales(scale, rows)
            scaled = (rows * scale.reciprocal().unsqueeze(1)).round_().clamp_(-self.LEVELS, self.LEVELS).view(-1)
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
