"""What quantizing codecs share: chunks of values, each with a scale in fp32."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from lightning_pipesync.core.codecs.blocks import as_dtype, blocks, scratch
from lightning_pipesync.core.codecs.codec import Codec


class ScaledChunks(Codec):
    """Chunks of ``CHUNK`` values, the last of which may be shorter, quantized to ``-LEVELS`` to ``LEVELS`` scales.

    Wire: for each chunk its scale, its largest magnitude / ``LEVELS``, and never below the smallest normal fp32 number;
    then the values in a whole number of bytes.
    """

    CHUNK: ClassVar[int]
    LEVELS: ClassVar[int]

    @abstractmethod
    def value_bytes(self, numel: int) -> int:
        """Returns the bytes of the quantized values."""

    @abstractmethod
    def pack(self, rounded: Tensor, packed: Tensor) -> None:
        """Writes whole numbers in fp32 to bytes; ``rounded`` may change."""

    @abstractmethod
    def unpack(self, packed: Tensor, values: Tensor) -> None:
        """Overwrites fp32 ``values`` with the numbers in these bytes."""

    def wire_bytes(self, numel: int, dtype: torch.dtype) -> int:
        self._require_floating_point(dtype)
        return 4 * self._num_chunks(numel) + self.value_bytes(numel)

    def encode(self, source: Tensor, wire: Tensor) -> None:
        for block, scale, packed in self._blocks(source, wire):
            rows = as_dtype(source[block], torch.float32).view(scale.numel(), -1)
            # amax and amin are several times faster than an infinity norm, and also keep a NaN.
            torch.maximum(rows.amax(1), rows.amin(1).neg_(), out=scale)
            scale.div_(self.LEVELS).clamp_(min=torch.finfo(torch.float32).tiny)
            # If the rows are scratch themselves, this is the same memory, and the multiplication is in place.
            scaled = scratch(source[block], torch.float32)
            torch.mul(rows, scale.reciprocal().unsqueeze(1), out=scaled.view_as(rows))
            self.pack(scaled.round_(), packed)

    def decode(self, wire: Tensor, target: Tensor, dtype: torch.dtype) -> None:
        for block, scale, packed in self._blocks(target, wire):
            into = target[block]
            values = self._decoded(scale, packed, into if into.dtype == torch.float32 else scratch(into, torch.float32))
            if values is not into:
                into.copy_(values)

    def decode_add(self, wire: Tensor, accumulator: Tensor, dtype: torch.dtype) -> None:
        for block, scale, packed in self._blocks(accumulator, wire):
            accumulator[block].add_(self._decoded(scale, packed, scratch(accumulator[block], torch.float32)))

    def _decoded(self, scale: Tensor, packed: Tensor, values: Tensor) -> Tensor:
        self.unpack(packed, values)
        values.view(scale.numel(), -1).mul_(scale.unsqueeze(1))
        return values

    def _num_chunks(self, numel: int) -> int:
        return -(-numel // self.CHUNK)

    def _blocks(self, values: Tensor, wire: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yields which values form each block, their scales and their bytes; a last short chunk is its own block."""
        numel = values.numel()
        scales, packed = wire.split([4 * self._num_chunks(numel), self.value_bytes(numel)])
        whole = numel // self.CHUNK * self.CHUNK
        for block in [*blocks(values[:whole]), slice(whole, numel)]:
            if block.start < block.stop:
                chunks = slice(block.start // self.CHUNK, self._num_chunks(block.stop))
                place = slice(self.value_bytes(block.start), self.value_bytes(block.stop))
                yield block, scales.view(torch.float32)[chunks], packed[place]
