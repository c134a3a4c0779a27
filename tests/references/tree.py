"""Sums on a double binary tree in one process: a recursion over the places of a tree, as its docs define it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_pipesync.core.buckets import shard_of
from lightning_pipesync.core.codecs import Codec
from tests.references.pipe_sgd import through


def ranks_of_trees(world_size: int) -> tuple[list[int], list[int]]:
    """The rank at each place of both trees."""
    first = list(range(world_size))
    second = first[::-1] if world_size % 2 == 0 else first[1:] + first[:1]
    return first, second


def tree_sum(values: Sequence[Tensor]) -> Tensor:
    """The sum of tensors, by place: place 0 adds the sum of the others, of which those of an inner place come in order.

    Of several places the top is the one with the most zeros at the end of its bits.
    """
    below = _sum_of(range(1, len(values)), values)
    return values[0] if below is None else values[0] + below


def _sum_of(places: range, values: Sequence[Tensor]) -> Tensor | None:
    if not places:
        return None
    top = max(places, key=lambda place: place & -place)
    total = values[top]
    for part in (range(places.start, top), range(top + 1, places.stop)):
        if (below := _sum_of(part, values)) is not None:
            total = total + below
    return total


def halves_of_sum(values: Sequence[Tensor]) -> list[Tensor]:
    """The sum of each half of flat tensors, by rank: those that the roots of the two trees have."""
    trees = ranks_of_trees(len(values))
    return [tree_sum([shard_of(values[rank], half, 2) for rank in ranks]) for half, ranks in enumerate(trees)]


def residuals_of_roots(numel: int) -> list[Tensor]:
    """Zeros of the shape of each half."""
    return [shard_of(torch.zeros(numel), half, 2) for half in range(2)]


def all_reduce_on_tree(values: Sequence[Tensor], codec: Codec, dropped: Sequence[Tensor] | None) -> Tensor:
    """The mean of flat tensors, by rank, of which each root compresses its half, once.

    ``dropped``: what each root's codec dropped of its half.
    """
    means = [half / len(values) for half in halves_of_sum(values)]
    residuals = [None, None] if dropped is None else dropped
    return torch.cat([through(codec, mean, residual) for mean, residual in zip(means, residuals, strict=True)])
