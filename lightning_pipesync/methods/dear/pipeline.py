"""The two halves of the all-reduce, driven by a thread beside training (DeAR, Section III-B).

[Note: one thread, one order]
All communication is issued by one thread, in the order in which it is handed over: reduce-scatters in the order in
which gradients become ready, then all-gathers in the order of the forward pass. Both orders are the same on all ranks.
``IN_FLIGHT`` operations are on their way at a time: enough to keep the network busy, and so few that the bucket which
is needed first does not share it with all others.
"""

from __future__ import annotations

import functools
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_pipesync.core.handle import Handle, Worker
from lightning_pipesync.core.transport import Transport
from lightning_pipesync.methods.dear.bucket import FusedBucket

#: Operations on their way at a time, see [Note: one thread, one order].
IN_FLIGHT = 2


class Pipeline:
    """BackPipe and FeedPipe: reduces the gradients of buckets, and brings their weights up to date.

    Attributes:
        exposed_seconds: how long the training thread has waited for communication.

    Args:
        transport: the way to the other ranks.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._worker = Worker("pipesync-dear")
        self._in_flight: deque[tuple[Handle[Any], Callable[[Any], object]]] = deque()
        self._awaited: set[threading.Event] = set()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self.exposed_seconds = 0.0

    def reduce(self, bucket: FusedBucket) -> None:
        """Starts to average the bucket's gradients over the ranks; each rank gets its shard of them."""
        self._submit(lambda: self._start(bucket.start_reducing(), lambda _: None))

    def finish_reducing(self, flag: int) -> int:
        """Blocks until all gradients are averaged; returns the union of the bits of all ranks' ``flag``.

        Raises:
            RuntimeError: a peer is lost.
        """
        flags: list[int] = []
        self._submit(lambda: self._start(self._transport.exchange_flags(flag), flags.extend))
        self.drain()
        return functools.reduce(operator.or_, flags)

    def drain(self) -> None:
        """Blocks until nothing is under way.

        Raises:
            RuntimeError: a peer is lost.
        """
        landed = threading.Event()
        self._expect(landed)
        self._submit(self._land_all)
        self._submit(landed.set)
        self._wait(landed)

    def feed(self, buckets: Sequence[FusedBucket]) -> None:
        """Starts to bring the weights of buckets up to date, the first one first."""
        for bucket in buckets:
            bucket.arrived.clear()
            self._expect(bucket.arrived)
        for bucket in buckets:
            self._submit(functools.partial(self._feed, bucket))
        self._submit(self._land_all)

    def wait_for(self, bucket: FusedBucket) -> None:
        """Blocks until the weights of the bucket are up to date.

        Raises:
            RuntimeError: a peer is lost.
        """
        self._wait(bucket.arrived)

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """Counts the time within as exposed communication."""
        start = time.perf_counter()
        yield
        self.exposed_seconds += time.perf_counter() - start

    def close(self, timeout_s: float) -> None:
        """Ends the thread, after what is under way or after ``timeout_s`` seconds."""
        self._worker.close(timeout_s)

    def _feed(self, bucket: FusedBucket) -> None:
        def finish(_: Any) -> None:
            bucket.finish_feeding()
            bucket.arrived.set()

        self._start(bucket.start_feeding(), finish)

    def _start(self, handle: Handle[Any], after: Callable[[Any], object]) -> None:
        self._in_flight.append((handle, after))
        if len(self._in_flight) == IN_FLIGHT:
            self._land()

    def _land(self) -> None:
        handle, after = self._in_flight.popleft()
        after(handle.wait())

    def _land_all(self) -> None:
        while self._in_flight:
            self._land()

    def _submit(self, job: Callable[[], object]) -> None:
        def run() -> None:
            if self._error is None:
                try:
                    job()
                except BaseException as error:
                    self._fail(error)

        self._worker.submit(run)

    def _expect(self, event: threading.Event) -> None:
        """Sees to it that ``event`` is set after an error, too, so that nobody waits for ever."""
        with self._lock:
            self._awaited = {other for other in self._awaited if not other.is_set()} | {event}
            if self._error is not None:
                event.set()

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = error
            for event in self._awaited:
                event.set()

    def _wait(self, event: threading.Event) -> None:
        if not event.is_set():
            with self.exposed():
                event.wait()
        if self._error is not None:
            raise self._error
