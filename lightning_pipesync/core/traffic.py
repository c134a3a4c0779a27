"""What crossed the network and how long training waited for it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_pipesync.core.handle import on_worker_thread


class Traffic:
    """Bytes sent and seconds waited, counted per kind of operation.

    Attributes:
        bytes_sent: payload bytes this rank handed to the network, by kind; headers of TCP or NCCL are not in it.
        seconds_waited: seconds that training was blocked until something had arrived or been delivered: the exposed
            communication, by kind. What the package's own threads wait for beside training is not in it, nor what a
            CUDA stream waits for, nor a framework's own barriers.
        operations: how many operations were issued, by kind.
    """

    def __init__(self) -> None:
        self.bytes_sent: Counter[str] = Counter()
        self.seconds_waited: dict[str, float] = {}
        self.operations: Counter[str] = Counter()
        self._this_thread = threading.local()

    def count(self, kind: str, num_bytes: int) -> None:
        """Counts one operation of ``kind`` that sends ``num_bytes`` bytes from this rank."""
        self.operations[kind] += 1
        self.bytes_sent[kind] += num_bytes

    @contextmanager
    def waiting(self, kind: str) -> Iterator[None]:
        """Counts the seconds spent inside as waited for ``kind``; nothing beside training, or within another wait."""
        if on_worker_thread() or getattr(self._this_thread, "waits", False):
            yield
            return
        start, self._this_thread.waits = time.perf_counter(), True
        try:
            yield
        finally:
            self._this_thread.waits = False
            self.seconds_waited[kind] = self.seconds_waited.get(kind, 0.0) + time.perf_counter() - start

    @property
    def num_operations(self) -> int:
        """How many operations were issued, of all kinds together; may be asked by another thread."""
        return sum(list(self.operations.values()))

    @property
    def total_bytes_sent(self) -> int:
        """Bytes sent, all kinds together."""
        return sum(self.bytes_sent.values())

    @property
    def total_seconds_waited(self) -> float:
        """Seconds waited, all kinds together."""
        return sum(self.seconds_waited.values())

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Returns the counters as plain dictionaries."""
        return {
            "bytes_sent": dict(self.bytes_sent),
            "seconds_waited": dict(self.seconds_waited),
            "operations": dict(self.operations),
        }

    def load_state_dict(self, state: dict[str, dict[str, float]]) -> None:
        """Continues from the counters that :meth:`state_dict` returned."""
        self.bytes_sent = Counter({kind: int(count) for kind, count in state["bytes_sent"].items()})
        self.seconds_waited = dict(state["seconds_waited"])
        self.operations = Counter({kind: int(count) for kind, count in state["operations"].items()})
