"""Sparsification by chunks, with two bits for each value that is kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from lightning_pipesync.core.codecs.codec import Codec

#: Chunks that are encoded at a time, which bounds the temporaries.
BLOCK = 64


class ChunkedTopK(Codec):
    """The 64 values of largest magnitude of each chunk of 4096, with 2 bits each; all others are zero (SparseLoCo).

    Wire: for each chunk two levels in fp32; then the 64 indices in its 4096 values, of 12 bits; then the 64 values,
    each a sign and which of the levels. The levels are the mean magnitudes of the kept values that are at least as
    large as their mean, and of the smaller ones. That is 120 bytes for 4096 values, 1/136 of fp32; a last short chunk
    takes as many. Use it with error feedback. A NaN or an infinity makes one of the levels of its chunk such a value.
    """

    name = "chunked_topk"
    CHUNK: ClassVar[int] = 4096  #: values of a chunk
    KEPT: ClassVar[int] = 64  #: values of a chunk that are kept

    def wire_bytes(self, numel: int, dtype: torch.dtype) -> int:
        self._require_floating_point(dtype)
        return sum(self._sections(numel))

    def encode(self, source: Tensor, wire: Tensor) -> None:
        levels, indices, signs = self._split(wire, source.numel())
        for rows, values in self._rows(source):
            values = values.to(torch.float32)
            kept = values.abs().topk(self.KEPT, dim=1, sorted=False).indices
            values = values.gather(1, kept)
            magnitudes = values.abs().to(torch.float64)  # the sum of two numbers may be beyond the range of fp32
            high = magnitudes >= magnitudes.mean(1, keepdim=True)
            levels[rows, 0] = torch.where(high, 0.0, magnitudes).sum(1) / (~high).sum(1).clamp(min=1)
            levels[rows, 1] = torch.where(high, magnitudes, 0.0).sum(1) / high.sum(1).clamp(min=1)
            even, odd = kept[:, 0::2], kept[:, 1::2]
            packed = torch.stack([even & 255, (even >> 8) | (odd & 15) << 4, odd >> 4], dim=2)
            indices[rows] = packed.view(packed.shape[0], -1).to(torch.uint8)
            codes = (high.to(torch.uint8) | (values < 0).to(torch.uint8) << 1).view(-1, self.KEPT // 4, 4)
            signs[rows] = codes[:, :, 0] | codes[:, :, 1] << 2 | codes[:, :, 2] << 4 | codes[:, :, 3] << 6

    def decode(self, wire: Tensor, target: Tensor, dtype: torch.dtype) -> None:
        self.decode_add(wire, target.zero_(), dtype)

    def decode_add(self, wire: Tensor, accumulator: Tensor, dtype: torch.dtype) -> None:
        levels, indices, signs = self._split(wire, accumulator.numel())
        for rows, values in self._rows(accumulator):
            triples = indices[rows].view(-1, self.KEPT // 2, 3).to(torch.int64)
            even, odd = triples[:, :, 0] | (triples[:, :, 1] & 15) << 8, triples[:, :, 1] >> 4 | triples[:, :, 2] << 4
            kept = torch.stack([even, odd], dim=2).view(-1, self.KEPT)
            shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=wire.device)
            codes = (signs[rows].unsqueeze(2) >> shifts).view(-1, self.KEPT) & 3
            magnitudes = levels[rows].gather(1, (codes & 1).to(torch.int64))
            decoded = torch.where(codes >= 2, -magnitudes, magnitudes).to(values.dtype)
            values.scatter_add_(1, kept, decoded)
            if (short := accumulator.numel() % self.CHUNK) and rows.stop == levels.shape[0]:
                accumulator[-short:].copy_(values.view(-1)[:short])  # that chunk is a copy

    def _num_chunks(self, numel: int) -> int:
        return -(-numel // self.CHUNK)

    def _sections(self, numel: int) -> list[int]:
        """Returns the bytes of levels, indices and signs."""
        return [self._num_chunks(numel) * each for each in (8, self.KEPT * 3 // 2, self.KEPT // 4)]

    def _split(self, wire: Tensor, numel: int) -> tuple[Tensor, Tensor, Tensor]:
        levels, indices, signs = wire.split(self._sections(numel))
        wide = indices.view(-1, self.KEPT * 3 // 2)
        return levels.view(torch.float32).view(-1, 2), wide, signs.view(-1, self.KEPT // 4)

    def _rows(self, values: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yields blocks of chunks: which ones, and their values, a row each; a last short chunk as a padded copy."""
        whole, short = divmod(values.numel(), self.CHUNK)
        table = values[: whole * self.CHUNK].view(whole, self.CHUNK)
        for begin in range(0, whole, BLOCK):
            rows = slice(begin, min(begin + BLOCK, whole))
            yield rows, table[rows]
        if short:
            row = torch.nn.functional.pad(values[-short:], (0, self.CHUNK - short))
            yield slice(whole, whole + 1), row.view(1, self.CHUNK)
