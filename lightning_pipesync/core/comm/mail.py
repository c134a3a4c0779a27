"""Mail: messages among all ranks, at any time and in any number, which threads send and receive.

[Note: keep-alives]
A rank may have nothing to send for longer than the timeout of a message, and when one times out, Gloo ends all
connections of the group. So messages have no timeout. An idle rank sends empty messages, and one from which nothing
arrives within the timeout counts as lost; so does one that has raised, even if it lives on.

[Note: one direction a connection]
A receiver posts the receives of the tensors once it has the header. In Gloo the notice of that queues behind outgoing
data of the same connection: two ranks that send large tensors to each other would take turns. So there are two groups,
one for messages to higher ranks and one for those to lower ones.

[Note: closing]
A rank that closes its mail says goodbye: it asks for nothing any more, and still answers, which may take messages to
itself. Once the peer has said goodbye, too, all is answered, and each sends the other a last message. After an error
nothing is said.

[Note: tensors of a device]
A message leaves, also to this rank itself, once its tensors are computed: a thread of the mail waits for that, see
wire.py. So whoever gets it may use them on any stream. Those from other ranks arrive in pinned memory.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from lightning_pipesync.core.comm.handle import CPU, Worker, begin_thread
from lightning_pipesync.core.comm.messages import Messages
from lightning_pipesync.core.comm.traffic import Traffic
from lightning_pipesync.core.comm.wire import HostCopies, Parcel, packed, pickled, start_unpacking
from lightning_pipesync.core.faults.errors import is_normal_end
from lightning_pipesync.core.faults.failure import KNOWN
from lightning_pipesync.core.faults.shutdown import at_shutdown, error_at_shutdown, join_thread
from lightning_pipesync.core.profiling import profiled

#: Maximum seconds between two messages, and their maximum as a fraction of the timeout.
INTERVAL_S, FRACTION_OF_TIMEOUT = 10.0, 1 / 4

Deliver = Callable[[int, Any], object]
Lose = Callable[[int, Exception], object]
End = Callable[[int], object]


class _Sign(Enum):
    """Messages between the threads, see [Note: closing] and [Note: keep-alives]."""

    ALIVE = "alive"
    GOODBYE = "goodbye"
    LAST = "last"
    STOP = "stop"


@dataclass(eq=False)
class Letter:
    """A message to several ranks, which is copied to the host and packed once."""

    message: Any
    parcel: Parcel | None = None


class Mail:
    """Messages of nested tensors and plain values among all ranks. Those between two ranks keep their order.

    Args:
        upwards: messages from lower to higher ranks, of a group that nothing else uses, without a timeout.
        downwards: messages from higher to lower ranks, of another such group.
        device: that of the tensors, if they are not on the host.
        traffic: counts the bytes sent.
        timeout_s: seconds without a message after which a rank counts as lost.
    """

    def __init__(
        self, upwards: Messages, downwards: Messages, device: torch.device, traffic: Traffic, timeout_s: float
    ) -> None:
        self._device, self._copies = device, HostCopies(device)
        self._upwards, self._downwards, self._rank = upwards, downwards, upwards.rank
        self._traffic, self._timeout_s = traffic, timeout_s
        self._interval_s = min(INTERVAL_S, timeout_s * FRACTION_OF_TIMEOUT)
        self._outboxes: dict[int, _Outbox] = {}
        self._inboxes: list[_Inbox] = []
        self._own: Worker | None = None
        self._closing = threading.Event()

    def start(self, deliver: Deliver, lose: Lose, end: End) -> None:
        """Starts to send and to receive.

        Args:
            deliver: called with each message, by a thread for each sender; if it raises, the sender counts as lost.
            lose: called with a rank that is lost, once, by another thread; with this one, if a thread of it has failed.
            end: called with a rank that has closed its mail without an error, by the thread that has delivered all its
                messages.
        """
        self._deliver, self._lose = deliver, lose
        up, down = self._upwards, self._downwards
        ways = {peer: (up, down) if peer > self._rank else (down, up) for peer in range(up.world_size)}
        del ways[self._rank]
        device = self._device
        self._own = Worker("pipesync-mail-own", device=device)
        self._outboxes = {
            peer: _Outbox(to, peer, device, self._traffic, self._interval_s) for peer, (to, _) in ways.items()
        }
        self._inboxes = [_Inbox(back, peer, device, deliver, end) for peer, (_, back) in ways.items()]
        self._listener = threading.Thread(target=self._listen, name="pipesync-mail-listener", daemon=True)
        self._listener.start()
        self._at_end = at_shutdown(self.close)

    def send(self, rank: int, message: Any) -> None:
        """Sends a message to a rank, or to this one; does not wait. Its tensors must not be changed afterwards.

        Nothing happens if that rank is lost. A :class:`Letter` goes to several ranks, by one thread.
        """
        letter = message if isinstance(message, Letter) else Letter(message)
        if rank != self._rank:
            if letter.parcel is None:
                letter.parcel = packed(letter.message, self._copies)
            self._outboxes[rank].put(letter)
            return
        assert self._own is not None
        computed = self._computed(letter.message)

        def deliver() -> None:
            try:
                if computed is not None:
                    computed.synchronize()
                self._deliver(rank, letter.message)
            except Exception as error:
                self._lose(rank, error)

        self._own.submit(deliver)

    def close(self, timeout_s: float) -> None:
        """Ends the threads, once all others have closed theirs or after ``timeout_s`` seconds; for good.

        If an exception is being handled, this rank counts as lost for the others.
        """
        if self._own is None or self._closing.is_set():
            return
        self._at_end.cancel()
        self._closing.set()
        delivered = threading.Event()
        self._own.submit(delivered.set)
        delivered.wait(timeout_s)
        succeeds = is_normal_end(sys.exc_info()[1] or error_at_shutdown())
        for outbox in self._outboxes.values():
            outbox.put_sign(_Sign.GOODBYE if succeeds else _Sign.STOP)
        deadline = time.monotonic() + timeout_s
        there = [inbox for inbox in self._inboxes if not inbox.is_lost]
        for inbox in there if succeeds else ():
            inbox.has_ended.wait(max(0.0, deadline - time.monotonic()))
            self._outboxes[inbox.peer].put_sign(_Sign.LAST)
        for inbox in there:
            for thread in (self._outboxes[inbox.peer].thread, inbox.thread):
                thread.join(max(0.0, deadline - time.monotonic()))
        threads = [outbox.thread for outbox in self._outboxes.values()] + [inbox.thread for inbox in self._inboxes]
        if any(thread.is_alive() for thread in threads):
            self._upwards.end_waits()
            self._downwards.end_waits()
        for thread in (*threads, self._listener):
            join_thread(thread, 1.0)
        self._own.close(max(0.0, deadline - time.monotonic()))

    def _computed(self, message: Any) -> torch.cuda.Event | None:
        """Returns an event after which the tensors of a message are computed; None: they are, or there are none."""
        if self._device.type != "cuda" or not any(tensor.is_cuda for tensor in pickled(message)[1]):
            return None
        computed = torch.cuda.Event(blocking=True)
        computed.record(torch.cuda.current_stream(self._device))
        return computed

    def _listen(self) -> None:
        """Tells which ranks are lost, see [Note: keep-alives]."""
        listened = {inbox.peer: inbox for inbox in self._inboxes}
        last = time.monotonic()
        while not self._closing.wait(self._interval_s / 4):
            now = time.monotonic()
            if now - last > self._interval_s:  # this process was frozen, too
                for inbox in listened.values():
                    inbox.heard = now
            for inbox in list(listened.values()):
                outbox = self._outboxes[inbox.peer]
                if outbox.broken_by is not None:
                    del listened[inbox.peer]
                    self._lose(self._rank, outbox.broken_by)
                    continue
                error = inbox.error or outbox.error
                if error is None and self._upwards.is_known_lost(inbox.peer):
                    error = self._upwards.failed_receive(RuntimeError(KNOWN), inbox.peer)
                if error is None and now - inbox.heard > self._timeout_s and not inbox.has_ended.is_set():
                    silent = RuntimeError(f"no sign of life for {self._timeout_s:g} s")
                    error = self._upwards.failed_receive(silent, inbox.peer)
                if error is not None:
                    del listened[inbox.peer]
                    inbox.is_lost = True
                    self._lose(inbox.peer, error)
            last = time.monotonic()  # to name a lost rank may take long


class _Outbox:
    """The messages to one rank, and the thread that sends them, until ``error``, or ``broken_by`` one of its own."""

    def __init__(
        self, messages: Messages, peer: int, device: torch.device, traffic: Traffic, interval_s: float
    ) -> None:
        self._messages, self._peer, self._device, self._traffic = messages, peer, device, traffic
        self._interval_s = interval_s
        self.error: RuntimeError | None = None
        self.broken_by: Exception | None = None
        self._queue: queue.SimpleQueue[Letter] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=f"pipesync-to-{peer}", daemon=True)
        self.thread.start()

    def put(self, letter: Letter) -> None:
        assert letter.parcel is not None
        self._traffic.count("send", letter.parcel.nbytes)
        self._queue.put(letter)

    def put_sign(self, sign: _Sign) -> None:
        self._queue.put(_letter_of(sign))

    def _run(self) -> None:
        begin_thread(self._device)
        try:
            message = None
            while message is not _Sign.LAST:
                try:
                    letter = self._queue.get(timeout=self._interval_s)
                except queue.Empty:
                    letter = _letter_of(_Sign.ALIVE)
                message = letter.message
                if message is _Sign.STOP:
                    return
                assert letter.parcel is not None
                with profiled("send", type(message).__name__):
                    for work in [self._messages.start_sending(part, self._peer) for part in letter.parcel.wait()]:
                        self._messages.wait_sent(work, self._peer)
        except RuntimeError as error:  # the peer is lost
            self.error = error
        except Exception as error:  # such as a MemoryError
            self.broken_by = error


class _Inbox:
    """The thread that receives the messages from one rank, until ``error``.

    ``heard``: when the last message arrived. ``has_ended``: set once the rank has said goodbye, or its messages do not
    arrive. ``is_lost``: whether it was told that the rank is lost.
    """

    def __init__(self, messages: Messages, peer: int, device: torch.device, deliver: Deliver, end: End) -> None:
        self._messages, self.peer, self._device, self._deliver, self._end = messages, peer, device, deliver, end
        self.heard, self.has_ended, self.is_lost = time.monotonic(), threading.Event(), False
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, name=f"pipesync-from-{peer}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        begin_thread(self._device)
        pin_memory = self._device.type == "cuda"
        try:
            while True:
                message = start_unpacking(self._messages, self.peer, CPU, pin_memory=pin_memory)()
                self.heard = time.monotonic()
                if message is _Sign.LAST:
                    return
                if message is _Sign.GOODBYE:
                    self.has_ended.set()
                    self._end(self.peer)
                elif message is not _Sign.ALIVE:
                    self._deliver(self.peer, message)
        except Exception as error:
            self.error = error
            self.has_ended.set()


def _letter_of(sign: _Sign) -> Letter:
    return Letter(sign, packed(sign, HostCopies(CPU)))
