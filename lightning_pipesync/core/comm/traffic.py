"""Counters of bytes sent and seconds waited."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from lightning_pipesync.core.comm.handle import on_worker_thread
from lightning_pipesync.core.profiling import profiled


class Traffic:
    """Bytes sent and seconds waited, counted per kind of operation.

    Attributes:
        bytes_sent: payload bytes that this rank has sent in steps, by kind, without the headers of TCP or NCCL.
        bytes_beside: those that it has sent besides: the first weights, consolidations, states and measurements.
        seconds_waited: seconds that communication has blocked training, by kind: the exposed communication. Without the
            waits of this package's threads, of CUDA streams, and of a framework's own barriers.
        operations: the number of operations issued, by kind.
    """

    def __init__(self) -> None:
        self.bytes_sent: Counter[str] = Counter()
        self.bytes_beside = 0
        self.seconds_waited: dict[str, float] = {}
        self.operations: Counter[str] = Counter()
        self._this_thread = threading.local()
        self._num_beside = 0  # contexts of beside_steps()

    def count(self, kind: str, num_bytes: int, in_steps: bool = True) -> None:
        self.operations[kind] += 1
        if in_steps and not self._num_beside:
            self.bytes_sent[kind] += num_bytes
        else:
            self.bytes_beside += num_bytes

    @contextmanager
    def beside_steps(self) -> Iterator[None]:
        """Counts what is sent inside, on any thread, in ``bytes_beside``; nothing of a step may be in flight."""
        self._num_beside += 1
        try:
            yield
        finally:
            self._num_beside -= 1

    def waiting(self, kind: str) -> AbstractContextManager[None]:
        """Counts the seconds spent inside as waited for ``kind``, except on worker threads and within another wait."""
        return nullcontext() if on_worker_thread() or getattr(self._this_thread, "waits", False) else self._timed(kind)

    @contextmanager
    def _timed(self, kind: str) -> Iterator[None]:
        start, self._this_thread.waits = time.perf_counter(), True
        try:
            with profiled("wait for", kind):
                yield
        finally:
            self._this_thread.waits = False
            self.seconds_waited[kind] = self.seconds_waited.get(kind, 0.0) + time.perf_counter() - start

    @property
    def num_operations(self) -> int:
        """The number of operations issued, of all kinds; may be read by another thread."""
        return sum(list(self.operations.values()))

    @property
    def total_bytes_sent(self) -> int:
        return sum(self.bytes_sent.values())

    @property
    def total_seconds_waited(self) -> float:
        return sum(self.seconds_waited.values())

    def state_dict(self) -> dict[str, Any]:
        counts = {name: dict(getattr(self, name)) for name in ("bytes_sent", "seconds_waited", "operations")}
        return {**counts, "bytes_beside": self.bytes_beside}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.bytes_sent = Counter({kind: int(count) for kind, count in state["bytes_sent"].items()})
        self.bytes_beside = state["bytes_beside"]
        self.seconds_waited = dict(state["seconds_waited"])
        self.operations = Counter({kind: int(count) for kind, count in state["operations"].items()})
