"""What quantizing codecs share: chunks of values, each with a scale in fp32."""

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
