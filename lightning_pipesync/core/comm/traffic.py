"""Counters of bytes sent and seconds waited."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from lightning_pipesync.core.comm.handle import on_worker_thread
from lightning_pipesync.core.profiling import profiled


class Traffic:
    """Bytes sent and seconds waited, counted per kind of operation.

    Attributes:
        bytes_sent: payload bytes that this rank has sent, by kind, without the headers of TCP or NCCL.
        seconds_waited: seconds that communication has blocked training, by kind: the exposed communication. Without the
            waits of this package's threads, of CUDA streams, and of a framework's own barriers.
        operations: the number of operations issued, by kind.
    """

    def __init__(self) -> None:
        self.bytes_sent: Counter[str] = Counter()
        self.seconds_waited: dict[str, float] = {}
        self.operations: Counter[str] = Counter()
        self._this_thread = threading.local()

    def count(self, kind: str, num_bytes: int) -> None:
        self.operations[kind] += 1
        self.bytes_sent[kind] += num_bytes

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

    def state_dict(self) -> dict[str, dict[str, float]]:
        return {name: dict(getattr(self, name)) for name in ("bytes_sent", "seconds_waited", "operations")}

    def load_state_dict(self, state: dict[str, dict[str, float]]) -> None:
        self.bytes_sent = Counter({kind: int(count) for kind, count in state["bytes_sent"].items()})
        self.seconds_waited = dict(state["seconds_waited"])
        self.operations = Counter({kind: int(count) for kind, count in state["operations"].items()})
