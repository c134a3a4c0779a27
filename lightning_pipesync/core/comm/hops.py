"""One window of receives: how slices travel over Gloo, all-to-all, in a ring or on a tree.

[Note: receives first]
Gloo's own ``reduce_scatter_tensor`` is a whole all-reduce inside, and its ``all_gather`` is half duplex: over one TCP
pair the "ready to receive" notice queues behind that rank's own outgoing data, so that the two directions take turns.
Here every rank posts its receives, then its sends. Both directions then run at full rate, a reduce-scatter costs half
an all-reduce, and the two halves together cost what one all-reduce does (DeAR, Fig. 5).

[Note: one order of waiting]
A slice advances while its receiver waits for it, so all ranks must wait for their exchanges in the same order: if one
rank waits for exchange A and another for exchange B, neither advances.

[Note: straight to the owner]
All-to-all, in step s of P - 1 a rank sends to rank + s and receives from rank - s: at any time every rank has one
sender and one receiver. A window of steps is in flight: many of small messages, which take their latency together; few
of large ones, as the acknowledgements of each stream wait behind all data that a rank sends. Each slice is sent
directly to its owner, never as a partial sum, because a wire format is never summed: so each value is compressed once,
for any number of ranks.

[Note: one stream a link]
In a ring of P - 1 steps every rank sends one slice to the next rank and receives one from the rank before, so that each
link carries a single stream in each direction. All-to-all as many bytes are sent, but every receiver then has up to
P - 1 senders that compete for its link: on emulated hosts it took 1.1 times as long with 4 ranks, 1.2 to 1.4 with 8.
The ring costs P - 1 messages in sequence, so that small slices are better sent all-to-all.

[Note: partial sums]
In a ring's reduce-scatter the slice of rank r starts at rank r + 1 and visits all others; each adds its own values,
rank r last. The sums are of the type of the values: encoded values are never summed on the way, and travel all-to-all.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipesync.core.comm.messages import Messages
from lightning_pipesync.core.faults.failure import Waiting

#: Maximum and minimum number of all-to-all steps in flight; between these limits, as many as have these bytes. With 8
#: ranks at 200 Mbit/s, slices of 64 KiB took 1.3 times as long all at once, and slices of 16 KiB two at a time.
MOST_STEPS, LEAST_STEPS, BYTES_IN_FLIGHT = 16, 2, 128 * 1024

#: Slices of fewer bytes are faster all-to-all, and with 2 ranks there is nothing to gain. With 4 ranks, at 200 Mbit/s
#: and at 1 Gbit/s, slices of 64 KiB in a ring made DeAR's steps 10 to 20 % shorter.
MIN_SLICE_BYTES, MIN_RANKS = 32 * 1024, 3

#: Bytes of a piece in a ring. While one of a slice is added and forwarded, the next one arrives. Each costs about 0.3
#: ms of processor time, whatever its size: with 512 KiB, 16 MiB among 4 ranks took 1.6 times as much, and not less
#: time.
PIECE_BYTES = 2 * 1024 * 1024

#: Receives posted ahead from each neighbor in a ring or on a tree.
WINDOW = 4


class BufferPool:
    """Buffers for reuse, so that nothing is allocated after the first step; any thread may call it."""

    def __init__(self) -> None:
        self._free: defaultdict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = defaultdict(list)

    def take(self, *shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """Returns a tensor with undefined values; rows of bytes start at multiples of 16, as wires do."""
        try:
            return self._free[shape, dtype].pop()
        except IndexError:
            *rows, numel = shape
            room = -(-max(1, numel) // 16) * 16 if dtype == torch.uint8 else numel
            return torch.empty(*rows, room, dtype=dtype)[..., :numel]

    def give(self, *buffers: Tensor) -> None:
        for buffer in buffers:
            self._free[buffer.shape, buffer.dtype].append(buffer)

    def clear(self) -> None:
        self._free.clear()


class Hop(NamedTuple):
    """A message that a rank receives, and what becomes of it.

    Attributes:
        source: the rank that it comes from.
        piece: the values, after the message has arrived; None: nothing is received.
        adds: whether the message is added to them.
        targets: the ranks that ``piece`` is sent to then.
        beside: a message, and the rank that it is sent to right after the receive is posted.
    """

    messages: Messages
    source: int
    piece: Tensor | None
    adds: bool = False
    targets: Sequence[int] = ()
    beside: tuple[Tensor, int] | None = None


class Exchange:
    """Takes this rank's hops one after the other, a window of them in flight. Starts on construction.

    Args:
        messages: of the group.
        hops: in an order that leaves no rank waiting for one that waits for it.
        window: maximum number of hops in flight.
        complete: by rank, the number of hops after which its slice has arrived.
        pool: of the buffers for messages that are added.
        first: messages that are sent at once, to a rank.
    """

    def __init__(
        self,
        messages: Messages,
        hops: Sequence[Hop],
        window: int,
        complete: Mapping[int, int],
        pool: BufferPool,
        first: Sequence[tuple[Messages, Tensor, int]] = (),
    ) -> None:
        self._messages, self._hops, self._complete, self._pool = messages, hops, complete, pool
        self._receiving: deque[tuple[dist.Work, Tensor] | None] = deque()
        self._sending: list[tuple[dist.Work, int]] = []
        self._num_taken = 0
        self._post(hops[:window])
        for tagged, piece, target in first:
            self._sending.append((tagged.start_sending(piece, target), target))

    def wait_for(self, ranks: Iterable[int]) -> None:
        """Blocks until the slices of ranks have arrived, see [Note: one order of waiting].

        Raises:
            RuntimeError: a rank died or did not answer within the timeout.
        """
        end = max(self._complete[rank] for rank in ranks)
        if self._num_taken < end:
            with self._messages.waiting() as waiting:
                self._take_until(end, waiting)

    def finish(self) -> None:
        """Blocks until all messages are received and sent."""
        messages = self._messages
        with messages.waiting() as waiting:
            self._take_until(len(self._hops), waiting)
            for work, target in self._sending:
                waiting.what, waiting.peer = messages.deliveries[target]
                work.wait(messages.timeout)
        self._sending.clear()

    def _post(self, hops: Sequence[Hop]) -> None:
        for messages, source, piece, adds, _, _ in hops:
            if piece is None:
                self._receiving.append(None)
                continue
            arrival = self._pool.take(piece.numel(), dtype=piece.dtype) if adds else piece
            self._receiving.append((messages.start_receiving(arrival, source), arrival))
        for hop in hops:
            if hop.beside is not None:
                piece, target = hop.beside
                self._sending.append((hop.messages.start_sending(piece, target), target))

    def _take_until(self, end: int, waiting: Waiting) -> None:
        hops, receiving = self._hops, self._receiving
        while self._num_taken < end:
            messages, source, piece, adds, targets, _ = hops[self._num_taken]
            received = receiving.popleft()
            if received is not None and piece is not None:
                work, arrival = received
                waiting.what, waiting.peer = messages.arrivals[source]
                work.wait(messages.timeout)
                if adds:
                    piece.add_(arrival)
                    self._pool.give(arrival)
                for target in targets:
                    self._sending.append((messages.start_sending(piece, target), target))
            self._num_taken += 1
            next_hop = self._num_taken + len(receiving)
            self._post(hops[next_hop : next_hop + 1])


def all_to_all(
    messages: Messages,
    outgoing: Mapping[int, Tensor],
    incoming: Mapping[int, Tensor],
    pool: BufferPool,
    window: int | None = None,
) -> Exchange:
    """Sends a message to each peer and receives one from each, see [Note: straight to the owner].

    Args:
        outgoing: the tensors to send, by rank in the group.
        incoming: the tensors to receive into, by rank in the group.
        window: maximum number of steps in flight; None: as many as suit the size of the messages.
    """
    rank, world_size = messages.rank, messages.world_size
    if window is None:
        largest = max((message.nbytes for message in [*outgoing.values(), *incoming.values()]), default=0)
        window = min(MOST_STEPS, max(LEAST_STEPS, BYTES_IN_FLIGHT // max(1, largest)))
    hops, complete = [], {rank: 0}
    for step in range(1, world_size):
        source, target = (rank - step) % world_size, (rank + step) % world_size
        beside = (outgoing[target], target) if target in outgoing else None
        hops.append(Hop(messages, source, incoming.get(source), beside=beside))
        complete[source] = step
    return Exchange(messages, hops, window, complete, pool)


def ring(messages: Messages, slices: Sequence[Tensor], first: int, pool: BufferPool, *, adds: bool) -> Exchange:
    """Sends one slice of each rank around the ring, see [Note: one stream a link].

    Args:
        slices: the slice of each rank, by rank: 1-D views of one buffer.
        first: the rank whose slice this rank sends first; then it receives the slices of ``first - 1``, ``first - 2``,
            and so on, and forwards all but the last one.
        adds: whether what arrives is added to the slice, see [Note: partial sums].
    """
    world_size = messages.world_size
    following, previous = (messages.rank + 1) % world_size, (messages.rank - 1) % world_size
    hops: list[Hop] = []
    complete = {first: 0}
    for step in range(1, world_size):
        owner, targets = (first - step) % world_size, (following,) if step < world_size - 1 else ()
        hops += [Hop(messages, previous, piece, adds, targets) for piece in in_pieces(slices[owner], PIECE_BYTES)]
        complete[owner] = len(hops)
    sends = [(messages, piece, following) for piece in in_pieces(slices[first], PIECE_BYTES)]
    return Exchange(messages, hops, WINDOW, complete, pool, sends)


def in_pieces(values: Tensor, num_bytes: int) -> Sequence[Tensor]:
    """Splits values into pieces of ``num_bytes``; none if there are no values."""
    if values.nbytes <= num_bytes:
        return [values] if values.numel() else []
    return values.split(-(-num_bytes // values.element_size()))


def ring_is_faster(slice_bytes: int, world_size: int) -> bool:
    """Returns whether a ring is faster than all-to-all for slices of ``slice_bytes`` bytes."""
    return slice_bytes >= MIN_SLICE_BYTES and world_size >= MIN_RANKS
