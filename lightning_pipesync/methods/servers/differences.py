"""Weights that are sent as encoded differences to those that a learner has."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_pipesync.core.codecs import Codec


class Differences:
    """What each learner has of a server's shards, by which their next values are encoded.

    Both sides add what is decoded to what the learner has. So the error of a difference is part of the next one, and
    weights that rest are approached.

    Args:
        codec: of the differences.
        values: of the server's shards, which all learners have at first.
    """

    def __init__(self, codec: Codec, values: Sequence[Tensor]) -> None:
        self._codec, self._first = codec, [value.clone() for value in values]
        self._had: dict[int, list[Tensor]] = {}  # by learner

    @torch.no_grad()
    def encode(self, rank: int, values: Sequence[Tensor]) -> list[Tensor]:
        """Returns the encoded differences of values to what a learner has: of each shard a wire, 1-D, uint8."""
        had = self._had.get(rank) or [first.clone() for first in self._first]
        wires = []
        for own, value in zip(had, values, strict=True):
            size = self._codec.wire_bytes(own.numel(), own.dtype)
            wires.append(torch.empty(size, dtype=torch.uint8, device=own.device))
            self._codec.encode(value - own, wires[-1])
            self._codec.decode_add(wires[-1], own, own.dtype)
        self._had[rank] = had
        return wires

    def sent_whole(self, rank: int, values: Sequence[Tensor]) -> None:
        """Notes that a learner has got values as they are."""
        self._had[rank] = [value.clone() for value in values]

    def of(self, rank: int) -> list[Tensor]:
        """Returns a copy of what a learner has."""
        return [own.clone() for own in self._had.get(rank, self._first)]
