"""Communication that is issued in one order, beside training.

[Note: one thread, one order]
All operations of a lane are issued by one thread, in the order in which they are handed over, which has to be the same
on all ranks. ``IN_FLIGHT`` of them are on their way at a time: enough to keep the network busy, and so few that what is
needed first does not share it with all the rest.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from lightning_pipesync.core.handle import Handle, Promise, Worker

T = TypeVar("T")

#: Operations on their way at a time, see [Note: one thread, one order].
IN_FLIGHT = 2


class Lane:
    """Starts operations one after the other on a thread of its own.

    After an error no further operation is started, and whoever waits for one gets the error.

    Attributes:
        exposed_seconds: how long other threads have waited here.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._worker = Worker(name)
        self._in_flight: deque[Callable[[], None]] = deque()
        self._error: BaseException | None = None
        self.exposed_seconds = 0.0

    def submit(self, start: Callable[[], Handle[T]], after: Callable[[T], object] = lambda _: None) -> Handle[T]:
        """Queues an operation; returns what waits for it, and for ``after``, which gets its result on the thread.

        It may stay unfinished until as many others have been started as may be in flight, or until :meth:`land`.
        """
        promise: Promise[T] = Promise()
        started: Promise[Handle[T]] = Promise()

        def finish() -> T:
            result = started.wait().wait()
            after(result)
            return result

        def begin() -> None:
            self._run(started, start)
            self._in_flight.append(lambda: self._run(promise, finish))
            if len(self._in_flight) == IN_FLIGHT:
                self._in_flight.popleft()()

        self._worker.submit(begin)
        return Handle(lambda: self._wait(promise))

    def land(self) -> None:
        """Has all operations that were submitted finish, whether or not others follow; does not wait."""
        self._worker.submit(self._land)

    def drain(self) -> None:
        """Blocks until nothing is under way.

        Raises:
            RuntimeError: a peer is lost.
        """
        landed: Promise[None] = Promise()
        self.land()
        self._worker.submit(lambda: self._run(landed, lambda: None))
        self._wait(landed)

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """Counts the time within as exposed communication."""
        start = time.perf_counter()
        yield
        self.exposed_seconds += time.perf_counter() - start

    def close(self, timeout_s: float) -> None:
        """Ends the thread, after what is under way or after ``timeout_s`` seconds."""
        self._worker.close(timeout_s)

    def _land(self) -> None:
        while self._in_flight:
            self._in_flight.popleft()()

    def _run(self, promise: Promise[Any], function: Callable[[], Any]) -> None:
        """Fulfils the promise, unless there has been an error."""

        def checked() -> Any:
            if self._error is not None:
                raise self._error
            try:
                return function()
            except BaseException as error:
                self._error = error
                raise

        promise.run(checked)

    def _wait(self, promise: Promise[T]) -> T:
        if promise.done:
            return promise.wait()
        with self.exposed():
            return promise.wait()
