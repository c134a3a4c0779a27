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
their operations in the same order, as for rings, see ring.py.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from lightning_pipesync.core.buckets import shard_slice
from lightning_pipesync.core.codecs import Codec
from lightning_pipesync.core.codecs.codec import accumulation_dtype
from lightning_pipesync.core.comm.gloo import NUM_TAGS, GlooExchange
from lightning_pipesync.core.comm.messages import Messages, Pending
from lightning_pipesync.core.comm.topology import Sent, Topology
from lightning_pipesync.core.faults.failure import PeerWatch
from lightning_pipesync.core.feedback import ErrorFeedback
from lightning_pipesync.core.pool import BufferPool

#: A half has so many pieces, and so many for each level, of at least and at most so many bytes: more pieces fill a deep
#: tree sooner, and each costs about 0.3 ms of processor time.
PIECES, PIECES_OF_LEVEL, LEAST_PIECE_BYTES, MOST_PIECE_BYTES = 16, 4, 64 * 1024, 1024 * 1024

#: Receives posted ahead, from each child or parent.
WINDOW = 4


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

    def encoded_slice(self, numel: int, rank: int) -> slice:
        return slice(0, 0)

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
        self, tag: int, flat: Tensor, codec: Codec, mean: bool, feedback: ErrorFeedback | None
    ) -> Callable[[], Tensor]:
        values = flat.to(accumulation_dtype(flat.dtype))
        halves = [values[half] for half in self._topology.halves(flat.numel())]
        exchange = _Halves(
            [
                _Reduce(self._messages.tagged(tag + index), tree, half, self._pool)
                for index, (half, tree) in enumerate(zip(halves, self._topology.trees, strict=True))
            ]
        )

        def reduce() -> Tensor:
            exchange.finish()
            own, total = (self._slices(each)[self._rank] for each in (flat, values))
            if mean:
                total.div_(self._world_size)  # only the quotient is rounded to the dtype of ``flat``
            return own if values is flat else own.copy_(total)

        return reduce

    def _gather_slices(self, tag: int, slices: list[Tensor]) -> _Halves:
        return _Halves(
            [
                _Broadcast(self._messages.tagged(tag + index), tree, slices[tree.root])
                for index, tree in enumerate(self._topology.trees)
            ]
        )

    def _slices(self, flat: Tensor) -> list[Tensor]:
        return [flat[self._topology.shard_slice(flat.numel(), rank)] for rank in range(self._world_size)]

    def _next_tag(self) -> int:
        self._tag = (self._tag + 2) % NUM_TAGS  # each half has its own
        return self._tag


class _Reduce:
    """Adds the sums of this rank's children to its values of a half, in place, and sends them to its parent."""

    def __init__(self, messages: Messages, tree: Tree, values: Tensor, pool: BufferPool) -> None:
        self._messages, self._pool = messages, pool
        self._parent, self._pieces = tree.parent.get(messages.rank), in_pieces(values, messages.world_size)
        self._children = tree.children[messages.rank] if self._pieces else []
        window = min(WINDOW, len(self._pieces))
        self._staging = {child: [pool.take(self._pieces[0].nbytes) for _ in range(window)] for child in self._children}
        self._receiving: dict[int, deque[Pending]] = {child: deque() for child in self._children}
        self._sending: list[Pending] = []
        for index in range(window):
            self._post(index)
        if not self._children:
            self._send(self._pieces)

    @property
    def num_pieces(self) -> int:
        return len(self._pieces)

    def advance(self, index: int) -> None:
        """Blocks until a piece is summed, and sends it on."""
        piece = self._pieces[index]
        for child in self._children:
            self._messages.wait_received(self._receiving[child].popleft(), child)
            piece.add_(self._arrival_of(child, index))
        self._post(index + WINDOW)
        if self._children:
            self._send([piece])

    def finish(self) -> None:
        if self._parent is not None:
            for work in self._sending:
                self._messages.wait_sent(work, self._parent)
        for buffers in self._staging.values():
            self._pool.give(buffers)

    def _send(self, pieces: Sequence[Tensor]) -> None:
        if self._parent is not None:
            self._sending += [self._messages.start_sending(piece, self._parent) for piece in pieces]

    def _post(self, index: int) -> None:
        if index < len(self._pieces):
            for child, receiving in self._receiving.items():
                receiving.append(self._messages.start_receiving(self._arrival_of(child, index), child))

    def _arrival_of(self, child: int, index: int) -> Tensor:
        piece, buffers = self._pieces[index], self._staging[child]
        return buffers[index % len(buffers)][: piece.nbytes].view(piece.dtype)


class _Broadcast:
    """Receives a half from this rank's parent, and sends it to its children."""

    def __init__(self, messages: Messages, tree: Tree, values: Tensor) -> None:
        self._messages, self._pieces = messages, in_pieces(values, messages.world_size)
        self._parent, self._children = tree.parent.get(messages.rank), tree.children[messages.rank]
        self._receiving: deque[Pending] = deque()
        self._sending: list[tuple[Pending, int]] = []
        for index in range(min(WINDOW, len(self._pieces))):
            self._post(index)
        if self._parent is None:
            for piece in self._pieces:
                self._send(piece)

    @property
    def num_pieces(self) -> int:
        return len(self._pieces)

    def advance(self, index: int) -> None:
        """Blocks until a piece has arrived, and sends it on."""
        if self._parent is not None:
            self._messages.wait_received(self._receiving.popleft(), self._parent)
            self._post(index + WINDOW)
            self._send(self._pieces[index])

    def finish(self) -> None:
        for work, child in self._sending:
            self._messages.wait_sent(work, child)

    def _send(self, piece: Tensor) -> None:
        self._sending += [(self._messages.start_sending(piece, child), child) for child in self._children]

    def _post(self, index: int) -> None:
        if self._parent is not None and index < len(self._pieces):
            self._receiving.append(self._messages.start_receiving(self._pieces[index], self._parent))


class _Halves:
    """Both trees' parts of an operation, whose pieces take turns: on all ranks in the same order."""

    def __init__(self, halves: Sequence[_Reduce | _Broadcast]) -> None:
        self._halves, self._finished = halves, False

    def wait_for(self, owner: int) -> None:
        self.finish()

    def finish(self) -> None:
        if self._finished:
            return
        for index in range(max(half.num_pieces for half in self._halves)):
            for half in self._halves:
                if index < half.num_pieces:
                    half.advance(index)
        for half in self._halves:
            half.finish()
        self._finished = True


def in_pieces(values: Tensor, world_size: int) -> list[Tensor]:
    """Splits the values of a half into pieces, see [Note: pieces]; none if there are none."""
    size = -(-piece_bytes(values.nbytes, world_size) // values.element_size())
    return list(values.split(size)) if values.numel() else []


def piece_bytes(half_bytes: int, world_size: int) -> int:
    """Returns the size of a piece of a half of a buffer."""
    pieces = max(PIECES, PIECES_OF_LEVEL * math.ceil(math.log2(world_size)))
    return min(MOST_PIECE_BYTES, max(LEAST_PIECE_BYTES, -(-half_bytes // pieces)))
