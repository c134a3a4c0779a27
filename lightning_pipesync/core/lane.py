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

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from lightning_pipesync.core.handle import Handle, Promise, Worker
from lightning_pipesync.core.traffic import Traffic

T = TypeVar("T")

#: Operations on their way at a time, see [Note: one thread, one order].
IN_FLIGHT = 2


class Lane:
    """Starts operations one after the other on a thread of its own.

    After an error no further operation is started, and whoever waits for one gets the error.

    Args:
        name: of the thread.
        device: where the tensors are.
        traffic: counts how long training waits here; not its streams.
    """

    def __init__(self, name: str, device: torch.device, traffic: Traffic) -> None:
        self._worker, self._device, self._traffic = Worker(name), device, traffic
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            self._worker.submit(lambda: torch.cuda.set_device(device))
        self._in_flight: deque[Callable[[], None]] = deque()
        self._error: BaseException | None = None
        self._submitted: deque[tuple[str, Promise[Any]]] = deque()  # what may not have ended yet

    def submit(
        self, kind: str, start: Callable[[], Handle[T]], after: Callable[[T], object] = lambda _: None
    ) -> Handle[T]:
        """Queues an operation; returns what waits for it, and for ``after``, which gets its result on the thread.

        It may stay unfinished until as many others have been started as may be in flight, or until :meth:`land`.

        Args:
            kind: as what waiting for it counts.
            start: called on the thread.
            after: called on the thread when it is complete.
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
        self._submitted.append((kind, promise))
        return Handle(lambda: self._wait(kind, promise))

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
        for kind, promise in self._submitted:
            with self._traffic.waiting(kind):
                promise.wait()
        self._submitted.clear()
        self._result(landed)

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

    def _wait(self, kind: str, promise: Promise[tuple[T, torch.cuda.Event | None]]) -> T:
        with self._traffic.waiting(kind):
            result = self._result(promise)
        while self._submitted and self._submitted[0][1].done:  # they end in the order in which they were submitted
            self._submitted.popleft()
        return result

    def _result(self, promise: Promise[tuple[T, torch.cuda.Event | None]]) -> T:
        """Returns the result when it is there, for the caller's stream, too."""
        result, event = promise.wait()
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
        return result

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _record(self) -> torch.cuda.Event | None:
        return None if self._stream is None else self._stream.record_event()
