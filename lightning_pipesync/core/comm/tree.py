"""Reduce and broadcast on a double binary tree over Gloo: the two halves of an all-reduce in log2(P) messages.

[Note: two trees]
DeAR, Section VII-A: a double binary tree (Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast,
reduction and scan", 2009) decouples into a reduce and a broadcast. A buffer has two halves, each with a tree of its
own. Places 0 to P - 1 of a tree are ranks; place 0 is the root, and has one child: the top of a binary tree on the
places 1 to P - 1, in order, so that all odd places are leaves. The second tree mirrors the first one, or is shifted by
one rank if P is odd. So an inner node of one tree is a leaf of the other, and no rank sends or receives more than a
buffer in each half: P / (P - 1) times as many bytes as in a ring, but ceil(log2 P) messages follow each other in place
of P - 1. (With an odd P one rank is inner in both trees, with a single child in each.)

[Note: order of summation]
A rank adds to its own values the sum of its first child, then that of its second one, in the order of their places:
the sum is the same for every size of the pieces, and in every run. Sums travel in the type of sums, fp32 for 16-bit
floats.

[Note: encoded once]
A wire format is never summed, and partial sums that were encoded again at each level would be compressed log2(P)
times. So the reduce carries values as they are. The roots encode the sums, once, for the broadcast.

[Note: pieces]
A half travels in pieces: while one is summed, or passed on, the next one arrives, so that the time of a large buffer
does not grow with the depth of the tree. A piece advances while its receiver waits for it: all ranks must wait for
their operations in the same order, see hops.py.

[Note: leaves last]
In a broadcast a rank first passes on the pieces of the tree in which it is an inner node. Those of the other tree have
passed all levels before they arrive: they come into the buffer meanwhile, and are waited for last. If both took turns,
each piece would pass all levels of one tree before the next piece leaves the root of the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain, zip_longest

import torch.distributed as dist
from torch import Tensor

from lightning_pipesync.core.buckets import shard_slice
from lightning_pipesync.core.codecs import Codec
from lightning_pipesync.core.codecs.codec import accumulation_dtype
from lightning_pipesync.core.comm.gloo import NUM_TAGS, GlooExchange, Span
from lightning_pipesync.core.comm.hops import WINDOW, Exchange, Hop, in_pieces
from lightning_pipesync.core.comm.messages import Messages
from lightning_pipesync.core.comm.topology import Sent, Topology
from lightning_pipesync.core.faults.failure import PeerWatch
from lightning_pipesync.core.feedback import ErrorFeedback

#: A half has so many pieces, and so many for each level, of at least and at most so many bytes: more pieces fill a deep
#: tree sooner, and each costs about 0.3 ms of processor time.
PIECES, PIECES_OF_LEVEL, LEAST_PIECE_BYTES, MOST_PIECE_BYTES = 16, 4, 64 * 1024, 1024 * 1024

#: The hops of each piece of a half, in order, and what is sent at once.
Half = tuple[list[list[Hop]], list[tuple[Messages, Tensor, int]]]


class Tree:
    """The binary tree of one half of each buffer, see [Note: two trees].

    Attributes:
        root: the rank that gets the sum, and from which it is broadcast.
        parent: of each rank but the root.
        children: of each rank, at most two, in the order in which their sums are added.

    Args:
        ranks: the rank at each place.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.root = ranks[0]
        self.parent: dict[int, int] = {}
        self.children: dict[int, list[int]] = {rank: [] for rank in ranks}
        for place, rank in enumerate(ranks[1:], start=1):
            lowest_bit = place & -place  # its zeros are the height of the place
            left = place - lowest_bit
            above = left | 2 * lowest_bit
            self.parent[rank] = ranks[above if above < len(ranks) else left]
            self.children[self.parent[rank]].append(rank)


class DoubleTree(Topology):
    """Two complementary trees of all ranks; the two roots own the halves of each buffer, and other ranks nothing.

    A rank alone is the root of one tree, and owns all.
    """

    sends_sums = True

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        ranks = range(world_size)
        mirrored = ranks[::-1] if world_size % 2 == 0 else [*ranks[1:], *ranks[:1]]
        self.trees = [Tree(ranks), Tree(mirrored)] if world_size > 1 else [Tree(ranks)]
        self.num_shards = len(self.trees)

    def __str__(self) -> str:
        return "tree"

    def halves(self, numel: int) -> list[slice]:
        """Returns the slice of each tree; the second one may be shorter, or empty."""
        return [shard_slice(numel, half, self.num_shards) for half in range(self.num_shards)]

    def shard_slice(self, numel: int, rank: int) -> slice:
        owned = (half for half, tree in zip(self.halves(numel), self.trees, strict=True) if tree.root == rank)
        return next(owned, slice(numel, numel))

    def sent_to_reduce(self, numel: int, rank: int, wires: bool = False) -> list[Sent]:
        return [(size, False) for size, tree in self._sizes(numel) if rank != tree.root]

    def sent_to_gather(self, numel: int, rank: int, wires: bool = False) -> list[Sent]:
        return [(size, True) for size, tree in self._sizes(numel) for _ in tree.children[rank]]

    def _sizes(self, numel: int) -> list[tuple[int, Tree]]:
        return [(half.stop - half.start, tree) for half, tree in zip(self.halves(numel), self.trees, strict=True)]


class TreeExchange(GlooExchange):
    """:class:`GlooExchange` on a double binary tree, see the notes above: reduce to two roots, broadcast from them."""

    gathers_wires = False

    def __init__(self, topology: DoubleTree, group: dist.ProcessGroup, watch: PeerWatch) -> None:
        super().__init__(group, watch)
        self._topology = topology

    def _start_reduce_scatter(
        self,
        tag: int,
        flat: Tensor,
        slices: Sequence[Tensor],
        codec: Codec,
        mean: bool,
        feedback: ErrorFeedback | None,
    ) -> Callable[[], Tensor]:
        values = flat.to(accumulation_dtype(flat.dtype))
        halves = [values[half] for half in self._topology.halves(flat.numel())]
        exchange = self._both(tag, halves, self._reduce)

        def reduce() -> Tensor:
            exchange.finish()
            own = slices[self._rank]
            return self._set(own, own if values is flat else self._slices(values)[self._rank], mean)

        return reduce

    def _gather_slices(self, tag: int, slices: Sequence[Tensor]) -> Exchange:
        halves = [slices[tree.root] for tree in self._topology.trees]
        return self._both(tag, halves, self._broadcast, leaves_last=True)

    def _both(
        self,
        tag: int,
        halves: Sequence[Tensor],
        half_of: Callable[[Messages, Tree, Tensor], Half],
        leaves_last: bool = False,
    ) -> Exchange:
        """Starts both trees' parts of an operation, whose pieces take turns: on all ranks in the same order.

        ``leaves_last``: but for those that are not passed on, see [Note: leaves last]; all receives are posted at once.
        """
        parts = [
            half_of(self._messages.tagged(tag + index), tree, half)
            for index, (half, tree) in enumerate(zip(halves, self._topology.trees, strict=True))
        ]
        in_turns = list(zip_longest(*(hops for hops, _ in parts), fillvalue=()))
        hops, ahead = ([hop for each in turns for hop in chain(*each)] for turns in (in_turns, in_turns[:WINDOW]))
        if leaves_last:
            ahead = hops = sorted(hops, key=lambda hop: not hop.targets)
        complete = dict.fromkeys(range(self._world_size), len(hops))
        sends = [send for _, sends in parts for send in sends]
        return Exchange(self._messages, hops, len(ahead), complete, self._pool, sends)

    def _reduce(self, messages: Messages, tree: Tree, values: Tensor) -> Half:
        """Adds the sums of this rank's children to its values of a half, in place, and sends them to its parent."""
        pieces, children = self._pieces(values), tree.children[self._rank]
        parent = [tree.parent[self._rank]] if self._rank in tree.parent else []
        hops = [
            [Hop(messages, child, piece, True, parent if child == children[-1] else ()) for child in children]
            for piece in pieces
        ]
        return hops, [] if children else [(messages, piece, rank) for piece in pieces for rank in parent]

    def _broadcast(self, messages: Messages, tree: Tree, values: Tensor) -> Half:
        """Receives a half from this rank's parent, and sends it to its children."""
        pieces, children = self._pieces(values), tree.children[self._rank]
        if self._rank == tree.root:
            return [], [(messages, piece, child) for piece in pieces for child in children]
        return [[Hop(messages, tree.parent[self._rank], piece, False, children)] for piece in pieces], []

    def _pieces(self, values: Tensor) -> Sequence[Tensor]:
        return in_pieces(values, piece_bytes(values.nbytes, self._world_size))

    def _spans(self, flat: Tensor, codec: Codec) -> list[Span]:
        halves = zip(self._topology.halves(flat.numel()), self._topology.trees, strict=True)
        roots = [(range(tree.root, tree.root + 1), half) for half, tree in halves if half.start < half.stop]
        return [self._span(root, half, flat, codec) for root, half in roots]

    def _slices(self, flat: Tensor) -> list[Tensor]:
        return [flat[self._topology.shard_slice(flat.numel(), rank)] for rank in range(self._world_size)]

    def _next_tag(self) -> int:
        self._tag = (self._tag + 2) % NUM_TAGS  # each half has its own
        return self._tag


def piece_bytes(half_bytes: int, world_size: int) -> int:
    """Returns the size of a piece of a half of a buffer."""
    pieces = max(PIECES, PIECES_OF_LEVEL * math.ceil(math.log2(world_size)))
    return min(MOST_PIECE_BYTES, max(LEAST_PIECE_BYTES, -(-half_bytes // pieces)))
