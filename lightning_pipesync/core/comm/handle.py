"""Handles of asynchronous operations, and the threads that run them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from lightning_pipesync.core.faults.shutdown import at_shutdown, error_at_shutdown, join_thread
from lightning_pipesync.core.torch_private import name_thread

T = TypeVar("T")

CPU = torch.device("cpu")

_this_thread = threading.local()


class Handle(Generic[T]):
    """A handle of an asynchronous operation. It may be waited for more than once.

    Args:
        wait: blocks until the operation is complete, and returns its result.
        finishes_early: whether a queue may finish the operation as soon as it has nothing else to do; not if waiting
            sends further messages, whose order must be the same on all ranks, or makes a stream wait.
    """

    def __init__(self, wait: Callable[[], T], finishes_early: bool = True) -> None:
        self._wait: Callable[[], T] | None = wait
        self._result: T
        self._error: BaseException | None = None
        self.finishes_early = finishes_early

    def wait(self) -> T:
        """Blocks until the operation is complete and returns its result.

        Raises:
            RuntimeError: a peer died, or did not answer within the transport's timeout; and again at each
                further call.
        """
        if self._error is not None:
            raise self._error
        if self._wait is not None:
            try:
                self._result = self._wait()
            except RuntimeError as error:  # Gloo would wait for what has failed until its timeout
                self._error = error
                raise
            self._wait = None
        return self._result


class Promise(Handle[T]):
    """A result that another thread supplies.

    Attributes:
        done: whether there is a result or an error.
    """

    def __init__(self) -> None:
        self.finishes_early = True
        self.done = False
        self._undone = threading.Lock()  # an Event would make two locks and a queue
        self._undone.acquire()
        self._error: BaseException | None = None

    def run(self, function: Callable[[], T]) -> None:
        try:
            self._result = function()
        except BaseException as error:
            self._error = error
        self.done = True
        self._undone.release()

    def wait(self) -> T:
        """Blocks until :attr:`done`; returns the result or raises the error."""
        if not self.done:
            with self._undone:
                pass
        if self._error is not None:
            raise self._error
        return self._result

    def succeeds(self, timeout_s: float) -> bool:
        """Returns whether there is a result, and no error, after ``timeout_s`` seconds at most."""
        if not self.done and self._undone.acquire(timeout=timeout_s):
            self._undone.release()
        return self.done and self._error is None


class Worker:
    """A thread that runs jobs one after the other. It is a daemon: it never keeps a dying process alive.

    ``idle`` is called when no job is queued, and again as long as it returns True: it has done something. ``device`` is
    the current one of its jobs, if it is a CUDA device.

    Attributes:
        thread: the thread.
    """

    def __init__(self, name: str, idle: Callable[[], bool] = lambda: False, device: torch.device = CPU) -> None:
        self._idle, self._device = idle, device
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()
        self._at_end = at_shutdown(self._end_after_error)

    def submit(self, job: Callable[[], None]) -> None:
        """Queues ``job``, which must not raise.

        Raises:
            RuntimeError: the thread is closed.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("The transport is closed.")
            self._jobs.put(job)

    def close(self, timeout_s: float) -> None:
        """Ends the thread after the queued jobs; waits at most ``timeout_s`` seconds."""
        self._at_end.cancel()
        with self._lock:
            self._closed = True
            self._jobs.put(None)
        join_thread(self.thread, timeout_s)

    def _end_after_error(self, _: float) -> None:
        """Ends the thread if an error has ended the loop before it was closed: it may stay in C++ code."""
        if error_at_shutdown() is not None:
            self.close(0.0)

    def _run(self) -> None:
        _this_thread.is_worker = True
        begin_thread(self._device)
        while (job := self._next()) is not None:
            job()
        while self._idle():
            pass

    def _next(self) -> Callable[[], None] | None:
        while self._jobs.empty() and self._idle():
            pass
        return self._jobs.get()


def begin_thread(device: torch.device) -> None:
    """Shows the name of the calling thread, and sets its current device, which is at first that of another rank."""
    name_thread(threading.current_thread().name)
    if device.type == "cuda":
        torch.cuda.set_device(device)


def on_worker_thread() -> bool:
    """Returns whether the calling thread is a :class:`Worker`'s. All others, autograd's included, count as training."""
    return getattr(_this_thread, "is_worker", False)
