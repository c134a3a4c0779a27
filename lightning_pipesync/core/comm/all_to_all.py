"""All-to-all over Gloo: a message to and from each peer, at full rate in both directions at once.

[Note: receives first]
Gloo's own ``reduce_scatter_tensor`` is a whole all-reduce inside, and its ``all_gather`` is half duplex: over one TCP
pair the "ready to receive" notice queues behind that rank's own outgoing data, so that the two directions take turns.
Here every rank posts all its receives, then all its sends. Both directions then run at full rate, a reduce-scatter
costs half an all-reduce, and the two halves together cost what one all-reduce does (DeAR, Fig. 5).

[Note: straight to the owner]
In step s of P - 1 a rank sends to rank + s and receives from rank - s: at any time every rank has one sender and one
receiver. ``window`` steps are in flight: many of small messages, which take their latency together; few of large ones,
as the acknowledgements of each stream wait behind all data that a rank sends. Each slice is sent directly to its owner,
never as a partial sum, because a wire format is never summed: so each value is compressed once, for any number of
ranks. Steps are posted while a receiver waits, so that all ranks must wait for their exchanges in the same order, as
for rings: see ring.py.
"""

from __future__ import annotations

from torch import Tensor

from lightning_pipesync.core.comm.messages import Messages, Pending

#: Maximum and minimum number of steps in flight; between these limits, as many as have these bytes. With 8 ranks at 200
#: Mbit/s, slices of 64 KiB took 1.3 times as long all at once, and slices of 16 KiB 1.3 times as long two at a time.
MOST_STEPS, LEAST_STEPS, BYTES_IN_FLIGHT = 16, 2, 128 * 1024


class AllToAllExchange:
    """Sends one message to each peer and receives one from each, see the notes above. Starts on construction.

    Args:
        messages: sends and receives.
        outgoing: the tensors to send, by rank in the group.
        incoming: the tensors to receive into, by rank in the group.
        window: maximum number of steps in flight; None: as many as suit the size of the messages.
    """

    def __init__(
        self, messages: Messages, outgoing: dict[int, Tensor], incoming: dict[int, Tensor], window: int | None = None
    ) -> None:
        self._messages, self._outgoing, self._incoming = messages, outgoing, incoming
        self._rank, self._world_size = messages.rank, messages.world_size
        self._receiving: dict[int, Pending] = {}
        self._sending: dict[int, Pending] = {}
        self._next_step = 1
        if window is None:
            largest = max((message.nbytes for message in [*outgoing.values(), *incoming.values()]), default=0)
            window = min(MOST_STEPS, max(LEAST_STEPS, BYTES_IN_FLIGHT // max(1, largest)))
        self._post(window)

    def _post(self, num_steps: int) -> None:
        end = min(self._next_step + num_steps, self._world_size)
        steps = range(self._next_step, end)
        self._next_step = end
        for peer in ((self._rank - step) % self._world_size for step in steps):
            if peer in self._incoming:
                self._receiving[peer] = self._messages.start_receiving(self._incoming[peer], peer)
        for peer in ((self._rank + step) % self._world_size for step in steps):
            if peer in self._outgoing:
                self._sending[peer] = self._messages.start_sending(self._outgoing[peer], peer)

    def wait_for(self, peer: int) -> None:
        """Blocks until the message from ``peer`` has arrived, if one is expected.

        Raises:
            RuntimeError: the peer died or did not answer within the timeout.
        """
        while self._next_step <= (self._rank - peer) % self._world_size:
            self._advance()
        if peer in self._receiving:
            self._messages.wait_received(self._receiving.pop(peer), peer)
            self._post(1)

    def finish(self) -> None:
        """Blocks until all messages are received and sent."""
        while self._next_step < self._world_size:
            self._advance()
        for peer in list(self._receiving):
            self.wait_for(peer)
        for peer, work in self._sending.items():
            self._messages.wait_sent(work, peer)
        self._sending.clear()

    def _advance(self) -> None:
        if self._receiving:
            oldest = next(iter(self._receiving))
            self._messages.wait_received(self._receiving.pop(oldest), oldest)
        self._post(1)
