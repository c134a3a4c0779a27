"""Scalar 8-bit quantization."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_pipesync.core.codecs.blocks import as_dtype, scratch
from lightning_pipesync.core.codecs.scaled import ScaledChunks


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

    def encode(self, source: Tensor, wire: Tensor) -> None:
        scales, quantized = self._split(wire, source.numel())
        for block, chunks in self._chunked(source):
            scale = scales[chunks]
            rows = as_dtype(source[block], torch.float32).view(scale.numel(), -1)
            self._set_scales(scale, rows)
            # If the rows are scratch themselves, this is the same memory, and the multiplication is in place.
            scaled = scratch(source[block], torch.float32)
            torch.mul(rows, scale.reciprocal().unsqueeze(1), out=scaled.view_as(rows))
            quantized[block].view(torch.int8).copy_(scaled.round_())

    def decode(self, wire: Tensor, target: Tensor, dtype: torch.dtype) -> None:
        scales, quantized = self._split(wire, target.numel())
        for block, chunks in self._chunked(target):
            if target.dtype == torch.float32:
                self._dequantize(scales[chunks], quantized[block], target[block])
            else:
                values = scratch(target[block], torch.float32)
                target[block].copy_(self._dequantize(scales[chunks], quantized[block], values))

    def decode_add(self, wire: Tensor, accumulator: Tensor, dtype: torch.dtype) -> None:
        scales, quantized = self._split(wire, accumulator.numel())
        for block, chunks in self._chunked(accumulator):
            values = scratch(accumulator[block], torch.float32)
            accumulator[block].add_(self._dequantize(scales[chunks], quantized[block], values))

    @staticmethod
    def _dequantize(scale: Tensor, quantized: Tensor, values: Tensor) -> Tensor:
        values.copy_(quantized.view(torch.int8)).view(scale.numel(), -1).mul_(scale.unsqueeze(1))
        return values
