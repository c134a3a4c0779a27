"""Linear 2-bit quantization."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_pipesync.core.codecs.scaled import ScaledChunks
from lightning_pipesync.core.codecs.two_bits import pack_two_bits, unpack_two_bits


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
