"""8-bit floating point."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_pipesync.core.codecs.scaled import ScaledChunks


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
