"""What quantizing codecs share: chunks of values, each with a scale in fp32."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from lightning_pipesync.core.codecs.blocks import blocks
from lightning_pipesync.core.codecs.codec import Codec


class ScaledChunks(Codec):
    """Chunks of ``CHUNK`` values, the last of which may be shorter, quantized to ``-LEVELS`` to ``LEVELS`` scales.

    Wire: for each chunk its scale, then the values in a whole number of bytes. A scale is never below the smallest
    normal fp32 number.
    """

    CHUNK: ClassVar[int]
    LEVELS: ClassVar[int]

    @abstractmethod
    def value_bytes(self, numel: int) -> int:
        """Returns the bytes of the quantized values."""

    def wire_bytes(self, numel: int, dtype: torch.dtype) -> int:
        self._require_floating_point(dtype)
        return 4 * self._num_chunks(numel) + self.value_bytes(numel)

    def _num_chunks(self, numel: int) -> int:
        return -(-numel // self.CHUNK)

    def _split(self, wire: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Returns the scales, and the bytes of the values."""
        scales, quantized = wire.split([4 * self._num_chunks(numel), self.value_bytes(numel)])
        return scales.view(torch.float32), quantized

    def _chunked(self, values: Tensor) -> Iterator[tuple[slice, slice]]:
        """Yields which values and which chunks form each block; a last short chunk is a block of its own."""
        whole = values.numel() // self.CHUNK
        for block in blocks(values[: whole * self.CHUNK]):
            yield block, slice(block.start // self.CHUNK, block.stop // self.CHUNK)
        if values.numel() % self.CHUNK:
            yield slice(whole * self.CHUNK, values.numel()), slice(whole, whole + 1)

    def _set_scales(self, scale: Tensor, rows: Tensor) -> None:
        """Sets the scales of chunks, one a row of fp32 values, to their largest magnitudes / ``LEVELS``."""
        # amax and amin are several times faster than an infinity norm, and also keep a NaN.
        torch.maximum(rows.amax(1), rows.amin(1).neg_(), out=scale)
        scale.div_(self.LEVELS).clamp_(min=torch.finfo(torch.float32).tiny)
