"""Streams and events of a device that does not exist: what is ordered before what, as vector clocks.

[Note: vector clocks]
The host and each stream are parties. Each operation of a party has a number, and a party's clock has, of each party,
the number of the last operation that is certain to be complete before its own next one. An operation on a stream begins
after all that the host knows when it enqueues it. A wait merges clocks. Two operations are ordered if the later one's
party knew the number of the earlier one; what merely happened to run in this order on the CPU does not count.
The threads of the host are one party: their order is that which was observed.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

#: Held while clocks and accesses are read or changed: streams are used by several threads.
LOCK = threading.RLock()
_numbers = itertools.count()
_this_thread = threading.local()
_streams: list[Stream] = []

#: What is not in order, and how often it was found.
reports: Counter[str] = Counter()


class Wait(NamedTuple):
    """A place in the package that orders streams, or keeps memory for one."""

    call: str
    file: str
    function: str


#: The calls of :class:`Wait`.
CALLS = ("wait_event", "wait_stream", "record_stream", "synchronize")
#: The wait that has no effect, as if it were not in the code, and how often it was reached.
removed: Wait | None = None
num_removed = 0


def is_removed(call: str) -> bool:
    """Returns whether the calling method was itself called at the place of the removed wait."""
    global num_removed
    code = sys._getframe(2).f_code
    if removed is None or removed != Wait(call, code.co_filename.rsplit("/", 1)[-1], code.co_name):
        return False
    num_removed += 1
    return True


class Party:
    """The host or a stream, see [Note: vector clocks]."""

    def __init__(self, name: str) -> None:
        self.number, self.name = next(_numbers), name
        self.clock: dict[int, int] = {}

    def begin(self) -> int:
        """Returns the number of the next operation."""
        self.merge(HOST.clock)
        number = self.clock[self.number] = self.clock.get(self.number, 0) + 1
        return number

    def merge(self, clock: dict[int, int]) -> None:
        for party, number in clock.items():
            if self.clock.get(party, 0) < number:
                self.clock[party] = number

    def knows(self, party: int, number: int) -> bool:
        return self.clock.get(party, 0) >= number


HOST = Party("host")


class Stream(Party):
    """``torch.cuda.Stream``."""

    def __init__(self, device: object = None, priority: int = 0, name: str | None = None) -> None:
        super().__init__(name or f"stream of {threading.current_thread().name}")
        self.device = device
        _streams.append(self)

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        if not is_removed("wait_event"):
            with LOCK:
                self.merge(event.clock)

    def wait_stream(self, stream: Stream) -> None:
        if not is_removed("wait_stream"):
            with LOCK:
                self.merge(stream.clock)

    def synchronize(self) -> None:
        if not is_removed("synchronize"):
            with LOCK:
                HOST.merge(self.clock)


class Event:
    """``torch.cuda.Event``."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.clock: dict[int, int] = {}
        self._time = 0.0

    def record(self, stream: Stream) -> None:
        with LOCK:
            stream.merge(HOST.clock)
            self.clock, self._time = dict(stream.clock), time.perf_counter()

    def synchronize(self) -> None:
        if not is_removed("synchronize"):
            with LOCK:
                HOST.merge(self.clock)

    def elapsed_time(self, end: Event) -> float:
        for event in (self, end):
            if any(not HOST.knows(party, number) for party, number in event.clock.items()):
                reports["events: the time between events is asked for before both have come"] += 1
        return (end._time - self._time) * 1e3


DEFAULT = Stream(name="default stream")


def current_stream(device: object = None) -> Stream:
    return getattr(_this_thread, "stream", DEFAULT)


def set_stream(chosen: Stream) -> None:
    _this_thread.stream = chosen


@contextmanager
def stream(chosen: Stream) -> Iterator[Any]:
    """``torch.cuda.stream``: each thread has its own current stream."""
    before = current_stream()
    set_stream(chosen)
    try:
        yield
    finally:
        set_stream(before)


def synchronize(device: object = None) -> None:
    """``torch.cuda.synchronize``."""
    with LOCK:
        for each in _streams:
            HOST.merge(each.clock)
