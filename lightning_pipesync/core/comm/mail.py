"""Mail: messages among all ranks, at any time and in any number, which threads send and receive.

[Note: keep-alives]
A rank may have nothing to send for longer than the timeout of a message, and when one times out, Gloo ends all
connections of the group. So messages have no timeout. Each rank sends signs of life, and one from which nothing arrives
within the timeout counts as lost; so does one that has raised, even if it lives on.

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

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
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


@dataclass(eq=False)
class Letter:
    """A message to several ranks, which is copied to the host and packed once.

    ``in_steps``: whether it counts as sent in steps.
    """

    message: Any
    parcel: Parcel | None = None
    in_steps: bool = True


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
        self._peers = [peer for peer in range(upwards.world_size) if peer != self._rank]
        self._outboxes: dict[int, Worker] = {}
        self._inboxes: dict[int, threading.Thread] = {}
        self._heard: dict[int, float] = {}  # when the last message of each peer arrived
        #: Set once a peer has said goodbye, or its messages do not arrive.
        self._ended = {peer: threading.Event() for peer in self._peers}
        #: By peer, which rank is at fault that a thread of this one cannot send to it, or receive from it.
        self._failed: dict[int, tuple[int, Exception]] = {}
        self._lost: set[int] = set()
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
        self._deliver, self._lose, self._end = deliver, lose, end
        self._own = Worker("pipesync-mail-own", device=self._device)
        self._heard = dict.fromkeys(self._peers, time.monotonic())
        # All of them first: what is delivered may be answered to any rank.
        self._outboxes |= {peer: Worker(f"pipesync-to-{peer}", device=self._device) for peer in self._peers}
        for peer in self._peers:
            receive = partial(self._receive, peer)
            self._inboxes[peer] = threading.Thread(target=receive, name=f"pipesync-from-{peer}", daemon=True)
            self._inboxes[peer].start()
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
            self._traffic.count("send", letter.parcel.nbytes, letter.in_steps)
            self._post(rank, letter)
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
        deadline = time.monotonic() + timeout_s

        def seconds_left() -> float:
            return max(0.0, deadline - time.monotonic())

        there = [peer for peer in self._peers if peer not in self._lost]
        if is_normal_end(sys.exc_info()[1] or error_at_shutdown()):
            for peer in self._peers:
                self._post(peer, _letter_of(_Sign.GOODBYE))
            for peer in there:
                self._ended[peer].wait(seconds_left())
                self._post(peer, _letter_of(_Sign.LAST))
        for peer in there:
            self._outboxes[peer].close(seconds_left())
            self._inboxes[peer].join(seconds_left())
        threads = [*(outbox.thread for outbox in self._outboxes.values()), *self._inboxes.values()]
        if any(thread.is_alive() for thread in threads):
            self._upwards.end_waits()
            self._downwards.end_waits()
        for outbox in self._outboxes.values():
            outbox.close(1.0)
        for thread in (*self._inboxes.values(), self._listener):
            join_thread(thread, 1.0)
        self._own.close(seconds_left())

    def _computed(self, message: Any) -> torch.cuda.Event | None:
        """Returns an event after which the tensors of a message are computed; None: they are, or there are none."""
        if self._device.type != "cuda" or not any(tensor.is_cuda for tensor in pickled(message)[1]):
            return None
        computed = torch.cuda.Event(blocking=True)
        computed.record(torch.cuda.current_stream(self._device))
        return computed

    def _post(self, peer: int, letter: Letter) -> None:
        """Has the thread of a peer send it a letter; nothing happens once that thread has failed, or ended."""
        parcel, messages = letter.parcel, self._upwards if peer > self._rank else self._downwards
        assert parcel is not None

        def post() -> None:
            if peer in self._failed:
                return
            try:
                with profiled("send", type(letter.message).__name__):
                    for work in [messages.start_sending(part, peer) for part in parcel.wait()]:
                        messages.wait_sent(work, peer)
            except RuntimeError as error:  # the peer is lost
                self._failed[peer] = peer, error
            except Exception as error:  # such as a MemoryError
                self._failed[peer] = self._rank, error

        with suppress(RuntimeError):
            self._outboxes[peer].submit(post)

    def _receive(self, peer: int) -> None:
        """Receives the messages from a peer, and delivers them."""
        begin_thread(self._device)
        messages, pin_memory = self._downwards if peer > self._rank else self._upwards, self._device.type == "cuda"
        try:
            while True:
                message = start_unpacking(messages, peer, CPU, pin_memory=pin_memory)()
                self._heard[peer] = time.monotonic()
                if message is _Sign.LAST:
                    return
                if message is _Sign.GOODBYE:
                    self._ended[peer].set()
                    self._end(peer)
                elif message is not _Sign.ALIVE:
                    self._deliver(peer, message)
        except Exception as error:
            self._failed.setdefault(peer, (peer, error))
            self._ended[peer].set()

    def _listen(self) -> None:
        """Sends signs of life, and tells which ranks are lost, see [Note: keep-alives]."""
        listened, last, spoke = list(self._peers), time.monotonic(), time.monotonic()
        while not self._closing.wait(self._interval_s / 4):
            now = time.monotonic()
            if now - last > self._interval_s:  # this process was frozen, too
                self._heard = dict.fromkeys(self._peers, now)
            if now - spoke > self._interval_s:
                spoke = now
                for peer in self._peers:
                    self._post(peer, _letter_of(_Sign.ALIVE))
            for peer in list(listened):
                fault, error = self._failed.get(peer, (peer, None))
                if error is None and self._upwards.is_known_lost(peer):
                    error = self._upwards.failed_receive(RuntimeError(KNOWN), peer)
                if error is None and now - self._heard[peer] > self._timeout_s and not self._ended[peer].is_set():
                    silent = RuntimeError(f"no sign of life for {self._timeout_s:g} s")
                    error = self._upwards.failed_receive(silent, peer)
                if error is not None:
                    listened.remove(peer)
                    if fault == peer:
                        self._lost.add(peer)
                    self._lose(fault, error)
            last = time.monotonic()  # to name a lost rank may take long


def _letter_of(sign: _Sign) -> Letter:
    return Letter(sign, packed(sign, HostCopies(CPU)))
