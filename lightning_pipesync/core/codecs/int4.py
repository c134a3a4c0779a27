"""Scalar 4-bit quantization."""

from __future__ import annotations

import torch
from torch import Tensor

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

    def pack(self, scaled: Tensor, packed: Tensor) -> None:
        nibbles = scaled.round_().clamp_(-self.LEVELS, self.LEVELS).add_(8).to(torch.uint8).bitwise_and_(15)
        if nibbles.shape[-1] % 2:
            nibbles = torch.nn.functional.pad(nibbles, (0, 1))
        torch.bitwise_or(nibbles[..., 0::2], nibbles[..., 1::2] << 4, out=packed)

    def unpack(self, packed: Tensor, values: Tensor) -> None:
        nibbles = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)[..., : values.shape[-1]]
        values.copy_(nibbles).sub_(8)
