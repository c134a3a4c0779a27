"""Sparsification: only the largest values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar

import torch
from torch import Tensor

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
