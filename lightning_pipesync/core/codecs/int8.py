"""Scalar 8-bit quantization."""

from __future__ import annotations

import torch
from torch import Tensor

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

    def pack(self, scaled: Tensor, packed: Tensor) -> None:
        packed.view(torch.int8).copy_(scaled.round_())

    def unpack(self, packed: Tensor, values: Tensor) -> None:
        values.copy_(packed.view(torch.int8))
