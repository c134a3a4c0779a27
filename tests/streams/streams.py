"""Streams and events of devices that do not exist: what is ordered before what, as vector clocks.

[Note: vector clocks]
The host and each stream are parties. Each operation of a party has a number, and a party's clock has, of each party,
the number of the last operation that is certain to be complete before its own next one. An operation on a stream begins
after all that the host knows when it enqueues it. A wait merges clocks. Two operations are ordered if the later one's
party knew the number of the earlier one; what merely happened to run in this order on the CPU does not count.
The threads of the host are one party: their order is that which was observed.

[Note: devices]
Each rank of a host has a device of its own, and each thread has a current device, at first the one with index 0. A rank
that uses the device of another, as a thread does that has not set its own, is reported.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any, NamedTuple

import torch

#: Held while clocks and accesses are read or changed: streams are used by several threads.
LOCK = threading.RLock()
_numbers = itertools.count()
_this_thread = threading.local()
_streams: list[Stream] = []
_default_streams: dict[int, Stream] = {}

PACKAGE = "lightning_pipesync"
#: Frames of the package that a place names.
DEPTH = 4

#: What is not in order, and how often it was found.
reports: Counter[str] = Counter()
#: How often the host has waited for a device, by the name of the thread.
host_waits: Counter[str] = Counter()
#: How many tensors were copied to the host.
num_copies_to_host = 0


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


def wait_on_host(clock: dict[int, int]) -> None:
    if threading.current_thread() is not threading.main_thread():  # whose device the user sets
        with_index()
    with LOCK:
        HOST.merge(clock)
        host_waits[threading.current_thread().name] += 1


class Stream(Party):
    """``torch.cuda.Stream``."""

    def __init__(self, device: object = None, priority: int = 0, name: str | None = None) -> None:
        super().__init__(name or f"stream of {threading.current_thread().name}")
        self.device = with_index(device)
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
            wait_on_host(self.clock)


class Event:
    """``torch.cuda.Event``."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.clock: dict[int, int] = {}
        self._time = 0.0

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        with LOCK:
            stream.merge(HOST.clock)
            self.clock, self._time = dict(stream.clock), time.perf_counter()

    def synchronize(self) -> None:
        if not is_removed("synchronize"):
            wait_on_host(self.clock)

    def elapsed_time(self, end: Event) -> float:
        for event in (self, end):
            if any(not HOST.knows(party, number) for party, number in event.clock.items()):
                reports["events: the time between events is asked for before both have come"] += 1
        return (end._time - self._time) * 1e3


def own_device() -> torch.device:
    """Returns the device of this rank."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def with_index(device: Any = None) -> torch.device:
    """Returns a device, which by default is the thread's current one; reports one that is another rank's."""
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
    if device.type != "cuda":
        return torch.device(device.type)
    if device.index is None:
        device = torch.device("cuda", current_device())
    if device != own_device():
        reports[f"device: {device} on the rank of {own_device()} in {place()}"] += 1
    return device


def current_device() -> int:
    return getattr(_this_thread, "device", 0)


def set_device(device: Any) -> None:
    _this_thread.device = with_index(device).index


def forget_streams() -> None:
    """Forgets all streams, of which no access is known any more; the host goes on to count its operations."""
    with LOCK:
        _streams.clear()
        _default_streams.clear()
        HOST.clock = {HOST.number: HOST.clock.get(HOST.number, 0)}


def forget_devices() -> None:
    """Makes this thread's current device and streams those of a new thread."""
    _this_thread.__dict__.clear()


@contextmanager
def device(chosen: Any) -> Iterator[None]:
    """``torch.cuda.device``."""
    before = current_device()
    set_device(chosen)
    try:
        yield
    finally:
        _this_thread.device = before


def current_stream(device: Any = None) -> Stream:
    """``torch.cuda.current_stream``: each thread has its own."""
    device = with_index(device)
    chosen: Stream | None = _of_this_thread().get(device.index)
    if chosen is None:
        with LOCK:
            if device.index not in _default_streams:
                _default_streams[device.index] = Stream(device, name="default stream")
            chosen = _default_streams[device.index]
    return chosen


def _of_this_thread() -> dict[int, Stream]:
    """Returns the current streams of the thread, by the index of their device."""
    streams: dict[int, Stream] = _this_thread.__dict__.setdefault("streams", {})
    return streams


def set_stream(chosen: Stream) -> None:
    _of_this_thread()[chosen.device.index] = chosen
    _this_thread.device = chosen.device.index


@contextmanager
def stream(chosen: Stream) -> Iterator[Any]:
    """``torch.cuda.stream``."""
    before, device = current_stream(chosen.device), current_device()
    set_stream(chosen)
    try:
        yield
    finally:
        set_stream(before)
        _this_thread.device = device


def synchronize(device: object = None) -> None:
    """``torch.cuda.synchronize``."""
    with LOCK:
        for each in _streams:
            HOST.merge(each.clock)


@cache
def _file_in_package(path: str) -> str | None:
    _, package, file = path.rpartition(f"/{PACKAGE}/")
    return file if package else None


def place() -> str:
    """Returns where in the package the calling thread is, innermost first; or in the training."""
    places: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(places) < DEPTH:
        if file := _file_in_package(frame.f_code.co_filename):
            places.append(f"{file}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(places) or "the training"
