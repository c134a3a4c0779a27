"""A queue of communication operations, which a thread issues in order while training runs.

[Note: one thread, one order]
One thread issues and completes all operations of a queue, in the order of submission, which must be the same on all
ranks. ``IN_FLIGHT`` of them are in flight at a time: enough to keep the network busy, and few enough that the operation
needed first does not share the bandwidth with all others. Over Gloo an operation advances only while a thread waits for
it, see hops.py: so a thread that has nothing to issue waits for the oldest one. On a torus it does not: there waiting
starts the second direction, whose place in the order would depend on how fast this rank is.

[Note: streams]
On CUDA the thread works on its own stream. An operation starts after the work that the caller had enqueued before it
submitted. Waiting for a handle makes the caller's stream wait, not the host; waiting on the default stream would delay
training.
Free the tensors of an operation only after waiting for it: the caching allocator does not know of this stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, TypeVar

import torch

from lightning_pipesync.core.comm.handle import Handle, Promise, Worker
from lightning_pipesync.core.comm.nccl import HIGH_PRIORITY
from lightning_pipesync.core.comm.traffic import Traffic
from lightning_pipesync.core.profiling import profiled

T = TypeVar("T")

#: Operations in flight at a time, see [Note: one thread, one order].
IN_FLIGHT = 2


class Queued(Promise[T]):
    """A handle of an operation of a queue; waiting for it is counted in ``traffic`` under ``kind``."""

    def __init__(self, kind: str, traffic: Traffic, device: torch.device) -> None:
        super().__init__()
        self._kind, self._traffic, self._device = kind, traffic, device
        #: After the operation, on the queue's stream.
        self.event: torch.cuda.Event | None = None

    def wait_on_host(self) -> T:
        """Blocks as :meth:`wait` does, and makes no stream wait."""
        with self._traffic.waiting(self._kind):
            return super().wait()

    def wait(self) -> T:
        """Blocks until the operation is complete; the caller's stream waits for it, too."""
        result = self.wait_on_host()
        if self.event is not None:
            torch.cuda.current_stream(self._device).wait_event(self.event)
        return result


class CommQueue:
    """Starts operations one after the other on its own thread.

    After an error it starts no further operation, and every wait raises that error.

    Args:
        name: the thread's name.
        device: the device of the tensors.
        traffic: counts how long training waits.
    """

    def __init__(self, name: str, device: torch.device, traffic: Traffic) -> None:
        self._in_flight: deque[tuple[Handle[Any] | None, Callable[[], None]]] = deque()  # None: not started
        self._error: BaseException | None = None
        self._submitted: deque[Queued[Any]] = deque()  # operations that may be unfinished
        self._worker, self._device, self._traffic = Worker(name, self._advance, device), device, traffic
        self._stream = torch.cuda.Stream(device, priority=HIGH_PRIORITY) if device.type == "cuda" else None

    def submit(
        self,
        kind: str,
        start: Callable[[], Handle[T]],
        after: Callable[[T], object] = lambda _: None,
        requires: Queued[Any] | None = None,
        what: str = "",
    ) -> Queued[T]:
        """Queues an operation and returns a handle, which waits for the operation and for ``after``.

        One of NCCL or on a torus may stay unfinished until ``IN_FLIGHT`` have started, itself included, or until
        :meth:`start_finishing`.

        Args:
            kind: the kind of operation that waiting is counted under.
            start: starts the operation; called on the thread.
            after: called on the thread with the result.
            requires: an earlier operation of this queue that has to be complete before this one starts.
            what: what it is about, for profilers, which show ``kind`` and ``what``.
        """
        queued: Queued[T] = Queued(kind, self._traffic, self._device)
        handle: Handle[T] | None = None
        submitted = None if self._stream is None else torch.cuda.current_stream(self._device).record_event()

        def start_after_the_caller() -> Handle[T]:
            if self._stream is not None and submitted is not None:
                self._stream.wait_event(submitted)
            with profiled(kind, what, "start"):
                return start()

        def finish() -> T:
            assert handle is not None
            with profiled(kind, what, "finish"):
                result = handle.wait()
                after(result)
            if self._stream is not None:
                queued.event = self._stream.record_event()
            return result

        def begin() -> None:
            nonlocal handle
            while requires is not None and not requires.done and self._in_flight:
                self._finish_oldest()
            with suppress(BaseException):  # to finish it raises the same
                handle = self._checked(start_after_the_caller)
            self._in_flight.append((handle, lambda: queued.run(lambda: self._checked(finish))))
            if len(self._in_flight) == IN_FLIGHT:
                self._finish_oldest()

        self._worker.submit(begin)
        while self._submitted and self._submitted[0].done:  # they end in the order of submission
            self._submitted.popleft()
        self._submitted.append(queued)
        return queued

    def start_finishing(self) -> None:
        """Starts finishing all submitted operations, without waiting for them."""
        self._worker.submit(self._finish_all)

    def wait_all(self) -> None:
        """Blocks until all submitted operations are complete."""
        self.start_finishing()
        last: Queued[None] = Queued("all", self._traffic, self._device)

        def end() -> None:
            last.event = None if self._stream is None else self._stream.record_event()

        self._worker.submit(lambda: last.run(lambda: self._checked(end)))
        for queued in self._submitted:
            queued.wait_on_host()
        self._submitted.clear()
        last.wait()

    def close(self, timeout_s: float) -> None:
        """Ends the thread, after the operations in flight or after ``timeout_s`` seconds.

        The caller's stream waits for what these have enqueued, so that their tensors may be read or freed next.
        """
        self._worker.close(timeout_s)
        if self._stream is not None and self._error is None:  # after an error a peer may be gone: never wait for it
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _advance(self) -> bool:
        if not self._in_flight:
            return False
        handle = self._in_flight[0][0]
        if self._error is None and handle is not None and not handle.finishes_early:
            return False
        self._finish_oldest()
        return True

    def _finish_oldest(self) -> None:
        _, finish = self._in_flight.popleft()
        finish()

    def _finish_all(self) -> None:
        while self._in_flight:
            self._finish_oldest()

    def _checked(self, function: Callable[[], T]) -> T:
        """Returns what ``function`` returns on the queue's stream; after an error it raises that instead."""
        if self._error is not None:
            raise self._error
        try:
            with self._on_stream():
                return function()
        except BaseException as error:
            self._error = error
            raise

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
