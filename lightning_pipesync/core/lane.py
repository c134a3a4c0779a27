"""Communication that is issued in one order, beside training.

[Note: one thread, one order]
All operations of a lane are issued by one thread, in the order in which they are handed over, which has to be the same
on all ranks. ``IN_FLIGHT`` of them are on their way at a time: enough to keep the network busy, and so few that what is
needed first does not share it with all the rest.

[Note: streams]
On CUDA the thread works on a stream of its own: it begins after what the caller had enqueued when it submitted, and who
waits has his own stream wait for it, not the host. Waiting on the default stream would hold up the training instead.
What an operation uses may be freed only by who has waited for it: the allocator knows nothing of this stream.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from lightning_pipesync.core.handle import Handle, Promise, Worker

T = TypeVar("T")

#: Operations on their way at a time, see [Note: one thread, one order].
IN_FLIGHT = 2


class Lane:
    """Starts operations one after the other on a thread of its own.

    After an error no further operation is started, and whoever waits for one gets the error.

    Attributes:
        exposed_seconds: how long other threads have waited here; not their streams.

    Args:
        name: of the thread.
        device: where the tensors are.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._worker, self._device = Worker(name), device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            self._worker.submit(lambda: torch.cuda.set_device(device))
        self._in_flight: deque[Callable[[], None]] = deque()
        self._error: BaseException | None = None
        self.exposed_seconds = 0.0

    def submit(self, start: Callable[[], Handle[T]], after: Callable[[T], object] = lambda _: None) -> Handle[T]:
        """Queues an operation; returns what waits for it, and for ``after``, which gets its result on the thread.

        It may stay unfinished until as many others have been started as may be in flight, or until :meth:`land`.
        """
        promise: Promise[tuple[T, torch.cuda.Event | None]] = Promise()
        started: Promise[Handle[T]] = Promise()
        submitted = None if self._stream is None else torch.cuda.current_stream(self._device).record_event()

        def start_after_the_caller() -> Handle[T]:
            if self._stream is not None and submitted is not None:
                self._stream.wait_event(submitted)
            return start()

        def finish() -> tuple[T, torch.cuda.Event | None]:
            result = started.wait().wait()
            after(result)
            return result, self._record()

        def begin() -> None:
            self._run(started, start_after_the_caller)
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
        landed: Promise[tuple[None, torch.cuda.Event | None]] = Promise()
        self.land()
        self._worker.submit(lambda: self._run(landed, lambda: (None, self._record())))
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
                with self._on_stream():
                    return function()
            except BaseException as error:
                self._error = error
                raise

        promise.run(checked)

    def _wait(self, promise: Promise[tuple[T, torch.cuda.Event | None]]) -> T:
        with nullcontext() if promise.done else self.exposed():
            result, event = promise.wait()
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
        return result

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _record(self) -> torch.cuda.Event | None:
        return None if self._stream is None else self._stream.record_event()
