"""One message to and from each of many peers over Gloo, at the speed of the network in both directions at once.

[Note: receives first]
Gloo's own ``reduce_scatter_tensor`` does a whole all-reduce inside, and its ``all_gather`` is half duplex: over one TCP
pair the "ready to receive" notice queues behind that rank's own outgoing data, so that the two directions take turns.
Here every rank posts all its receives, then all its sends. Both directions then run at full rate, a reduce-scatter
costs half an all-reduce, and the two halves together cost what one all-reduce does (DeAR, Fig. 5).

[Note: a ring for many ranks]
In step s of P - 1 a rank sends to rank + s and receives from rank - s: at any time every rank has one sender and one
receiver. With few ranks all steps are posted at once; with many, ``window`` steps are in flight, which bounds the open
messages and avoids many senders for one receiver. Slices travel straight to their owner, never as partial sums, because
a wire format is never summed: the number of compressions stays one however many ranks there are.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import timedelta
from typing import cast

import torch.distributed as dist
from torch import Tensor

from lightning_pipesync.core.failure import naming_lost_peer

#: Steps of the ring in flight, see [Note: a ring for many ranks].
WINDOW = 16


class PairwiseExchange:
    """One message to each peer and one from each peer, see the notes above. All messages start on construction.

    Args:
        group: the process group.
        tag: tells this exchange from others in flight.
        timeout: how long to wait for one message.
        outgoing: the tensor for each peer, by rank in the group; a peer left out gets no message.
        incoming: where the message of each peer goes, likewise.
        window: steps of the ring in flight; None means ``WINDOW``.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        tag: int,
        timeout: timedelta,
        outgoing: dict[int, Tensor],
        incoming: dict[int, Tensor],
        window: int | None = None,
    ) -> None:
        self._group, self._tag, self._timeout = group, tag, timeout
        self._outgoing, self._incoming = outgoing, incoming
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._receiving: dict[int, dist.Work] = {}
        self._sending: dict[int, dist.Work] = {}
        self._next_step = 1
        self._post(WINDOW if window is None else window)

    def _post(self, num_steps: int) -> None:
        end = min(self._next_step + num_steps, self._world_size)
        steps = range(self._next_step, end)
        self._next_step = end
        for peer in ((self._rank - step) % self._world_size for step in steps):
            if peer in self._incoming:
                with self._naming(peer, "a message from"):
                    work = dist.irecv(self._incoming[peer], self._global(peer), self._group, self._tag)
                self._receiving[peer] = cast(dist.Work, work)
        for peer in ((self._rank + step) % self._world_size for step in steps):
            if peer in self._outgoing:
                with self._naming(peer, "the delivery of a message to"):
                    work = dist.isend(self._outgoing[peer], self._global(peer), self._group, self._tag)
                self._sending[peer] = cast(dist.Work, work)

    def wait_for(self, peer: int) -> None:
        """Blocks until the message of ``peer`` has arrived, if one is expected.

        Raises:
            RuntimeError: the peer died or did not answer within the timeout.
        """
        while self._next_step <= (self._rank - peer) % self._world_size:
            self._advance()
        if peer in self._receiving:
            self._wait(self._receiving.pop(peer), peer, "a message from")

    def finish(self) -> None:
        """Blocks until everything has arrived and everything has been sent."""
        while self._next_step < self._world_size:
            self._advance()
        for peer in list(self._receiving):
            self.wait_for(peer)
        for peer, work in self._sending.items():
            self._wait(work, peer, "the delivery of a message to")
        self._sending.clear()

    def _advance(self) -> None:
        """Moves the window on by one step."""
        if self._receiving:
            oldest = next(iter(self._receiving))
            self._wait(self._receiving.pop(oldest), oldest, "a message from")
        self._post(1)

    def _global(self, peer: int) -> int:
        return dist.get_global_rank(self._group, peer)

    def _naming(self, peer: int, what: str) -> AbstractContextManager[None]:
        return naming_lost_peer(self._rank, f"{what} rank {self._global(peer)}", self._timeout)

    def _wait(self, work: dist.Work, peer: int, what: str) -> None:
        with self._naming(peer, what):
            work.wait(self._timeout)
