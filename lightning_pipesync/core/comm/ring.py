"""Ring reduce-scatter and all-gather of large buffers over Gloo.

[Note: one stream a link]
In P - 1 steps every rank sends one slice to the next rank and receives one from the rank before, so that each link
carries a single stream in each direction. An all-to-all exchange sends as many bytes, but every receiver then has up to
P - 1 senders that compete for its link: on emulated hosts it took 1.1 times as long with 4 ranks, 1.2 to 1.4 with 8.
The ring costs P - 1 messages in sequence, so that small slices are better sent all-to-all.

[Note: partial sums]
In a reduce-scatter the slice of rank r starts at rank r + 1 and visits all others; each adds its own values, rank r
last. The sums are of the type of the values: encoded values are never summed on the way, and travel all-to-all.

[Note: one order of waiting]
A slice advances while its receiver waits for it, so all ranks must wait for their rings in the same order: if one rank
waits for ring A and another for ring B, neither advances.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from lightning_pipesync.core.comm.messages import Messages, Pending
from lightning_pipesync.core.pool import BufferPool

#: Slices of fewer bytes are faster all-to-all, and with 2 ranks there is nothing to gain. With 4 ranks, at 200 Mbit/s
#: and at 1 Gbit/s, slices of 64 KiB in a ring made DeAR's steps 10 to 20 % shorter.
MIN_SLICE_BYTES, MIN_RANKS = 32 * 1024, 3

#: Bytes of a piece. While one of a slice is added and forwarded, the next one arrives. Each costs about 0.3 ms of
#: processor time, whatever its size: with 512 KiB, 16 MiB among 4 ranks took 1.6 times as much, and not less time.
PIECE_BYTES = 2 * 1024 * 1024

#: Receives posted ahead.
WINDOW = 4


class RingExchange:
    """Sends one slice of each rank around the ring, see the notes above. Starts on construction.

    Args:
        messages: sends and receives.
        slices: the slice of each rank, by rank: 1-D views of one buffer.
        first: the rank whose slice this rank sends first; then it receives the slices of ``first - 1``, ``first - 2``,
            and so on, and forwards all but the last one.
        adding: the pool of the buffers for arriving pieces, which are added to the slice; None: a piece is received
            into the slice itself.
    """

    def __init__(
        self, messages: Messages, slices: Sequence[Tensor], first: int, adding: BufferPool | None = None
    ) -> None:
        self._messages, self._pool = messages, adding
        world_size = messages.world_size
        self._next, self._previous = (messages.rank + 1) % world_size, (messages.rank - 1) % world_size
        owners = [(first - step) % world_size for step in range(world_size)]
        self._pieces: list[Tensor] = []
        #: The number of pieces that have arrived when the slice of each rank is complete.
        self._complete: dict[int, int] = {}
        for owner in owners[1:]:
            self._pieces += in_pieces(slices[owner])
            self._complete[owner] = len(self._pieces)
        self._num_sent_on = self._complete.get(owners[-2], 0)
        self._arrived = 0
        self._receiving: deque[Pending] = deque()
        window = min(WINDOW, len(self._pieces))
        largest = max((piece.nbytes for piece in self._pieces), default=0)
        self._staging = [adding.take(largest) for _ in range(window)] if adding else []
        for _ in range(window):
            self._post_receive()
        self._sending = [messages.start_sending(piece, self._next) for piece in in_pieces(slices[first])]

    def wait_for(self, owner: int) -> None:
        """Blocks until the slice of rank ``owner`` has arrived, see [Note: one order of waiting].

        Raises:
            RuntimeError: a neighbor died or did not answer within the timeout.
        """
        while self._arrived < self._complete.get(owner, 0):
            self._advance()

    def finish(self) -> None:
        """Blocks until all slices are received and sent."""
        while self._receiving:
            self._advance()
        for work in self._sending:
            self._messages.wait_sent(work, self._next)
        self._sending.clear()
        if self._pool:
            self._pool.give(self._staging)

    def _advance(self) -> None:
        self._messages.wait_received(self._receiving.popleft(), self._previous)
        piece = self._pieces[self._arrived]
        if self._staging:
            piece.add_(self._arrival_of(self._arrived))
        self._arrived += 1
        if self._arrived <= self._num_sent_on:
            self._sending.append(self._messages.start_sending(piece, self._next))
        if self._arrived + len(self._receiving) < len(self._pieces):
            self._post_receive()

    def _post_receive(self) -> None:
        arrival = self._arrival_of(self._arrived + len(self._receiving))
        self._receiving.append(self._messages.start_receiving(arrival, self._previous))

    def _arrival_of(self, index: int) -> Tensor:
        piece = self._pieces[index]
        if not self._staging:
            return piece
        return self._staging[index % len(self._staging)][: piece.nbytes].view(piece.dtype)


def in_pieces(values: Tensor) -> list[Tensor]:
    """Splits a slice into pieces of at most :data:`PIECE_BYTES`; none if it is empty."""
    numel, largest = values.numel(), PIECE_BYTES // values.element_size()
    if numel <= largest:
        return [values] if numel else []
    return list(values.split(largest))


def ring_is_faster(slice_bytes: int, world_size: int) -> bool:
    """Returns whether a ring is faster than all-to-all for slices of ``slice_bytes`` bytes."""
    return slice_bytes >= MIN_SLICE_BYTES and world_size >= MIN_RANKS
