"""A queue of communication operations, which a thread issues in order while training runs.

[Note: one thread, one order]
One thread issues all operations of a queue, in the order of submission, which must be the same on all ranks.
``IN_FLIGHT`` of them are in flight at a time: enough to keep the network busy, and few enough that the operation
needed first does not share the bandwidth with all others.

[Note: streams]
On CUDA the thread works on its own stream. An operation starts after the work that the caller had enqueued before it
submitted. Waiting for a handle makes the caller's stream wait, not the host; waiting on the default stream would delay
training.
Free the tensors of an operation only after waiting for it: the caching allocator does not know of this stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from lightning_pipesync.core.comm.handle import Handle, Promise, Worker
from lightning_pipesync.core.comm.traffic import Traffic

T = TypeVar("T")

#: Operations in flight at a time, see [Note: one thread, one order].
IN_FLIGHT = 2


class Queued(Handle[T]):
    """A handle of an operation of a queue.

    Args:
        wait: blocks until the operation is complete, and returns its result.
        promise: is done when the operation is complete.
    """

    def __init__(self, wait: Callable[[], T], promise: Promise[Any]) -> None:
        super().__init__(wait)
        self._promise = promise

    @property
    def done(self) -> bool:
        """Whether the operation is complete, or has failed."""
        return self._promise.done


class CommQueue:
    """Starts operations one after the other on its own thread.

    After an error it starts no further operation, and every wait raises that error.

    Args:
        name: the thread's name.
        device: the device of the tensors.
        traffic: counts how long training waits for operations of this queue.
    """

    def __init__(self, name: str, device: torch.device, traffic: Traffic) -> None:
        self._worker, self._device, self._traffic = Worker(name), device, traffic
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            self._worker.submit(lambda: torch.cuda.set_device(device))
        self._in_flight: deque[Callable[[], None]] = deque()
        self._error: BaseException | None = None
        self._submitted: deque[tuple[str, Promise[Any]]] = deque()  # operations that may be unfinished

    def submit(
        self,
        kind: str,
        start: Callable[[], Handle[T]],
        after: Callable[[T], object] = lambda _: None,
        requires: Queued[Any] | None = None,
    ) -> Queued[T]:
        """Queues an operation and returns a handle, which waits for the operation and for ``after``.

        The operation may stay unfinished until ``IN_FLIGHT`` more have started, or until :meth:`flush`.

        Args:
            kind: the kind of operation that waiting is counted under.
            start: starts the operation; called on the thread.
            after: called on the thread with the result when the operation is complete.
            requires: an earlier operation of this queue that has to be complete before this one starts.
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
            while requires is not None and not requires.done and self._in_flight:
                self._in_flight.popleft()()
            self._run(started, start_after_the_caller)
            self._in_flight.append(lambda: self._run(promise, finish))
            if len(self._in_flight) == IN_FLIGHT:
                self._in_flight.popleft()()

        self._worker.submit(begin)
        self._submitted.append((kind, promise))
        return Queued(lambda: self._wait(kind, promise), promise)

    def flush(self) -> None:
        """Starts finishing all submitted operations, without waiting for them."""
        self._worker.submit(self._finish_in_flight)

    def wait_all(self) -> None:
        """Blocks until all submitted operations are complete.

        Raises:
            RuntimeError: a peer is lost.
        """
        flushed: Promise[tuple[None, torch.cuda.Event | None]] = Promise()
        self.flush()
        self._worker.submit(lambda: self._run(flushed, lambda: (None, self._record())))
        for kind, promise in self._submitted:
            with self._traffic.waiting(kind):
                promise.wait()
        self._submitted.clear()
        self._result(flushed)

    def close(self, timeout_s: float) -> None:
        """Ends the thread, after the operations in flight or after ``timeout_s`` seconds.

        The caller's stream waits for what these have enqueued, so that their tensors may be read or freed next.
        """
        self._worker.close(timeout_s)
        if self._stream is not None and self._error is None:  # after an error a peer may be gone: never wait for it
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _finish_in_flight(self) -> None:
        while self._in_flight:
            self._in_flight.popleft()()

    def _run(self, promise: Promise[Any], function: Callable[[], Any]) -> None:
        """Fulfils ``promise`` with the result of ``function``, or with the queue's first error."""

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
        while self._submitted and self._submitted[0][1].done:  # they end in the order of submission
            self._submitted.popleft()
        return result

    def _result(self, promise: Promise[tuple[T, torch.cuda.Event | None]]) -> T:
        """Returns the result; the caller's stream waits for it, too."""
        result, event = promise.wait()
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
        return result

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _record(self) -> torch.cuda.Event | None:
        return None if self._stream is None else self._stream.record_event()
