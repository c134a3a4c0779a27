"""Sparsification: only the largest values, of all or of each chunk."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar

import torch
from torch import Tensor

from lightning_pipesync.core.codecs.blocks import works_in_blocks
from lightning_pipesync.core.codecs.codec import Codec


@dataclass(frozen=True)
class TopK(Codec):
    """The k = ceil(ratio * numel) values of largest magnitude; all others are zero.

    Wire: k indices in int32, then k values in fp32, in no particular order. NaNs and infinities are larger than any
    number. Which of equal magnitudes are kept is unspecified. Unlike the other codecs it allocates in each call: at
    the default ratio, temporaries of 0.8 times the size of an fp32 source.
    """

    name: ClassVar[str] = "topk"
    sparse: ClassVar[bool] = True
    ratio: float = 0.01
    """Share of the values that is kept, in (0, 1]. At 0.5 and above the wire is no smaller than fp32."""

    def __post_init__(self) -> None:
        if not isinstance(self.ratio, Real) or not 0 < self.ratio <= 1:
            raise ValueError(f"ratio={self.ratio!r} of compression='topk' must be a number in (0, 1]")

    def num_kept(self, numel: int) -> int:
        """Returns k: at least 1 of any values, 0 of none."""
        return min(numel, max(1, math.ceil(self.ratio * numel)))

    def wire_bytes(self, numel: int, dtype: torch.dtype) -> int:
        self._require_floating_point(dtype)
        if numel >= 2**31:
            raise ValueError(
                f"compression='topk' indexes with int32 and cannot encode {numel} values: use smaller buckets"
            )
        return 8 * self.num_kept(numel)

    def encode(self, source: Tensor, wire: Tensor) -> None:
        if source.numel() == 0:
            return
        numel = source.shape[-1]
        indices, values = self._split(wire, numel)
        k = values.shape[-1]
        # The k largest magnitudes lie in the k columns with the largest maxima. With `height` rows that leaves
        # numel / height + k * height values to search instead of numel, which is least at height = sqrt(numel / k).
        height = math.isqrt(numel // k)
        width = numel // height
        table, rest = source[..., : height * width].unflatten(-1, (height, width)), source[..., height * width :]
        maxima = torch.maximum(table.amax(-2), table.amin(-2).neg_())
        columns = maxima.topk(k, sorted=False).indices
        searched = table.gather(-1, columns.unsqueeze(-2).expand(*table.shape[:-1], k))
        candidates = torch.cat([searched.flatten(-2), rest], dim=-1)
        kept = candidates.abs().topk(k, sorted=False).indices
        in_table = kept // k * width + columns.gather(-1, kept % k)
        in_rest = kept + height * (width - k)
        indices.copy_(torch.where(kept < height * k, in_table, in_rest))
        values.copy_(candidates.gather(-1, kept))

    def decode(self, wire: Tensor, target: Tensor, dtype: torch.dtype) -> None:
        self.decode_add(wire, target.zero_(), dtype)

    def decode_add(self, wire: Tensor, accumulator: Tensor, dtype: torch.dtype, alpha: float = 1) -> None:
        indices, values = self._split(wire, accumulator.shape[-1])
        accumulator.scatter_add_(-1, indices.to(torch.int64), values.to(accumulator.dtype) * alpha)

    def _split(self, wire: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        indices, values = wire.split(2 * [4 * self.num_kept(numel)], dim=-1)
        return indices.view(torch.int32), values.view(torch.float32)


#: Chunks that are encoded at a time, which bounds the temporaries.
BLOCK = 64


@dataclass(frozen=True)
class ChunkedTopK(Codec):
    """The k values of largest magnitude of each chunk of 4096, with 2 bits each; all others are zero (SparseLoCo).

    Wire: for each chunk two levels in fp32; then the k indices in its 4096 values, of 12 bits; then the k values, each
    a sign and which of the levels. The levels are the mean magnitudes of the kept values that are at least as large as
    their mean, and of the smaller ones; if there are zeros among them, that of all others, and zero. That is 120 bytes
    for 4096 values, 1/136 of fp32, with k = 64; a last short chunk takes as many. Use it with error feedback. A NaN or
    an infinity makes one of the levels of its chunk such a value.

    An all-reduce gathers what each rank has encoded (:attr:`Codec.gathered`): with P ranks, each sends its wire to
    P - 1 others.
    """

    name: ClassVar[str] = "chunked_topk"
    gathered: ClassVar[bool] = True
    sparse: ClassVar[bool] = True
    CHUNK: ClassVar[int] = 4096  #: values of a chunk
    k: int = 64
    """Values of a chunk that are kept, a power of two from 4 to 4096."""

    def __post_init__(self) -> None:
        if self.k not in [2**bits for bits in range(2, 13)]:
            raise ValueError(f"k={self.k!r} of compression='chunked_topk' must be a power of two from 4 to 4096.")

    def wire_bytes(self, numel: int, dtype: torch.dtype) -> int:
        self._require_floating_point(dtype)
        return sum(self.sections(numel))

    def encode(self, source: Tensor, wire: Tensor) -> None:
        levels, indices, signs = self._split(wire, source.shape[-1])
        for block, values in self._blocks(source):
            values = values.to(torch.float32)
            kept = values.abs().topk(self.k, sorted=False).indices
            values = values.gather(-1, kept)
            magnitudes = values.abs().to(torch.float64)  # the sum of two numbers may be beyond the range of fp32
            moved = magnitudes > 0
            has_zeros = moved.sum(-1, keepdim=True) < self._num_kept(block, source)
            high = torch.where(has_zeros, moved, magnitudes >= magnitudes.mean(-1, keepdim=True))
            levels[..., block, 0] = torch.where(high, 0.0, magnitudes).sum(-1) / (~high).sum(-1).clamp(min=1)
            levels[..., block, 1] = torch.where(high, magnitudes, 0.0).sum(-1) / high.sum(-1).clamp(min=1)
            even, odd = kept[..., 0::2], kept[..., 1::2]
            packed = torch.stack([even & 255, (even >> 8) | (odd & 15) << 4, odd >> 4], dim=-1)
            indices[..., block, :] = packed.flatten(-2).to(torch.uint8)
            codes = high.to(torch.uint8) | (values < 0).to(torch.uint8) << 1
            pack_two_bits(codes, signs[..., block, :])

    def decode(self, wire: Tensor, target: Tensor, dtype: torch.dtype) -> None:
        self.decode_add(wire, target.zero_(), dtype)

    def decode_add(self, wire: Tensor, accumulator: Tensor, dtype: torch.dtype, alpha: float = 1) -> None:
        levels, indices, signs = self._split(wire, accumulator.shape[-1])
        for block, values in self._blocks(accumulator):
            first, second, third = indices[..., block, :].to(torch.int64).unflatten(-1, (-1, 3)).unbind(-1)
            kept = torch.stack([first | (second & 15) << 8, second >> 4 | third << 4], dim=-1).flatten(-2)
            codes = unpack_two_bits(signs[..., block, :])
            magnitudes = (levels[..., block, :] * alpha).gather(-1, (codes & 1).to(torch.int64))
            decoded = torch.where(codes >= 2, -magnitudes, magnitudes).to(values.dtype)
            values.scatter_add_(-1, kept, decoded)
            if block.stop * self.CHUNK > accumulator.shape[-1]:  # they are a padded copy
                left = accumulator[..., block.start * self.CHUNK :]
                left.copy_(values.flatten(-2)[..., : left.shape[-1]])

    def _num_kept(self, block: slice, source: Tensor) -> int | Tensor:
        """Returns how many values of each chunk of a block are kept, less those with which a short chunk is padded."""
        last = source.shape[-1] - self.CHUNK * (block.stop - 1)
        if last >= self.k:
            return self.k
        num_kept = torch.full((block.stop - block.start, 1), self.k, device=source.device)
        num_kept[-1] = last
        return num_kept

    def _num_chunks(self, numel: int) -> int:
        return -(-numel // self.CHUNK)

    def sections(self, numel: int) -> list[int]:
        """Returns the bytes of levels, indices and signs."""
        return [self._num_chunks(numel) * each for each in (8, self.k * 3 // 2, self.k // 4)]

    def _split(self, wire: Tensor, numel: int) -> tuple[Tensor, Tensor, Tensor]:
        chunks = self._num_chunks(numel)
        levels, indices, signs = wire.split(self.sections(numel), dim=-1)
        return (
            levels.view(torch.float32).unflatten(-1, (chunks, 2)),
            indices.unflatten(-1, (chunks, self.k * 3 // 2)),
            signs.unflatten(-1, (chunks, self.k // 4)),
        )

    def _blocks(self, values: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yields blocks of chunks: which ones, and their values, shape ``[..., chunks, CHUNK]``.

        A block with a last short chunk is a padded copy; where there are several, it is that chunk alone.
        """
        whole = values.shape[-1] // self.CHUNK
        begins = [*range(0, whole, BLOCK), whole] if works_in_blocks(values) else [0]
        for begin, end in zip(begins, [*begins[1:], self._num_chunks(values.shape[-1])], strict=True):
            if begin < end:
                block = values[..., begin * self.CHUNK : end * self.CHUNK]
                missing = (end - begin) * self.CHUNK - block.shape[-1]
                padded = torch.nn.functional.pad(block, (0, missing)) if missing else block
                yield slice(begin, end), padded.unflatten(-1, (end - begin, self.CHUNK))


def pack_two_bits(numbers: Tensor, packed: Tensor) -> None:
    """Writes numbers from 0 to 3, uint8, to bytes, the first of four in the lowest bits; zeros follow the last."""
    if missing := -numbers.shape[-1] % 4:
        numbers = torch.nn.functional.pad(numbers, (0, missing))
    first, second, third, fourth = (numbers[..., place::4] << 2 * place for place in range(4))
    torch.bitwise_or(first | second, third | fourth, out=packed)


def unpack_two_bits(packed: Tensor) -> Tensor:
    """Returns the numbers in these bytes, uint8, four of each."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-1) >> shifts).flatten(-2) & 3
