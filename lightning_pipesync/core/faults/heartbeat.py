"""Heartbeats: each rank publishes its state in the job's store, so that a lost rank can be named.

[Note: only the heartbeat's thread calls the store]
A call to a store whose server is frozen may never return, whatever its timeout. So the heartbeat's thread makes all
calls, and other threads wait for it with a timeout.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from lightning_pipesync.core.faults.shutdown import join_thread

if TYPE_CHECKING:
    from lightning_pipesync.core.faults.neighbor import Neighbor

#: The key of the first fault that a rank has found.
_FAULT_KEY = "pipesync/fault"

#: Maximum seconds between two beats, and their maximum as a fraction of the timeout.
INTERVAL, FRACTION_OF_TIMEOUT = 1.0, 1 / 8

#: The timeout of the store, in seconds.
STORE_S = 5.0

#: Maximum seconds that :meth:`Heartbeat.close` waits.
GOODBYE_S = 1.0

T = TypeVar("T")


def interval_of(timeout_s: float) -> float:
    return min(INTERVAL, timeout_s * FRACTION_OF_TIMEOUT)


@dataclass(frozen=True)
class Wait:
    what: str  # in words
    peer: int | None  # None: any other
    since: float  # by the job's clock


@dataclass(frozen=True)
class Beat:
    """The state of a rank, as it publishes it."""

    number: int = 0  # grows while the rank is alive; 0: it has not published any
    at: float = 0.0  # seconds since the start of the job's clock
    host: str = "unknown"
    pid: int = 0
    exchanges: int = 0  # the number of operations that it has started
    waits: list[Wait] = field(default_factory=list)  # what it waits for now
    blames: int | None = None  # the rank that it has found at fault
    left: str | None = None  # None while it takes part; then the exception that it ended with, empty if there was none
    ahead: str | None = None  # what it has done that others may not have, in words
    lost_peer: bool = False  # whether another rank has caused that exception

    @classmethod
    def of_this_process(cls, number: int, at: float | None = None, **state: Any) -> Beat:
        """Returns a beat with the host and the id of this process, at this moment if ``at`` is None."""
        return cls(number, time.monotonic() if at is None else at, socket.gethostname(), os.getpid(), **state)


@dataclass(frozen=True)
class Fault:
    """The rank at fault, and the kind of fault."""

    kind: str  # a key of :data:`lightning_pipesync.core.faults.diagnosis.SENTENCES`
    rank: int
    host: str
    pid: int
    detail: str  # the exception, or the number of operations
    at: float  # when it happened, in seconds since the start of the job's clock


class Heartbeat:
    """Publishes this rank's state every ``interval`` seconds, and learns of a fault that another rank has found.

    A beat is one write to the store and one query; the other ranks' beats are read on request only.

    Args:
        store: nothing else uses its keys.
        describe: returns this rank's beat, given its number.
        on_fault: called once a fault has been known for the time of a beat.
        neighbor: the rank that this one listens to; None: nobody.
        on_silence: called with the rank, and its last beat, when ``neighbor`` has fallen silent.

    Attributes:
        first: the first beat of rank 0 that was read; None before.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        interval: float,
        describe: Callable[[int], Beat],
        on_fault: Callable[[], object] = lambda: None,
        neighbor: Neighbor | None = None,
        on_silence: Callable[[int, Beat], object] = lambda *_: None,
    ) -> None:
        self._neighbor, self._on_silence = neighbor, on_silence
        self.first: Beat | None = None
        self._store, self._describe, self._on_fault = store, describe, on_fault
        self._keys = [_key_of(peer) for peer in range(world_size)]
        self._key = self._keys[rank]
        self.interval = interval
        self._told: Fault | None = None
        self._known: tuple[Fault, float] | None = None  # the last fault, and when this thread learned of it
        self._acted_on: Fault | None = None
        self._forgotten: set[int] = set()
        self._number = 0
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock, self._ended = Lock(), False
        self._thread = Thread(target=self._run, name="pipesync-heartbeat", daemon=True)
        self._thread.start()

    @staticmethod
    def last_beat(store: dist.Store, rank: int) -> Beat:
        """Returns the last beat of a rank; calls the store."""
        key = _key_of(rank)
        return (_read_as(_beat_from, key, store.get(key)) if store.check([key]) else None) or Beat()

    @property
    def fault(self) -> Fault | None:
        """The fault that some rank has published; None if there is none, or the rank at fault is forgotten."""
        told = self._told
        return None if told is None or told.rank in self._forgotten else told

    def forget_rank(self, rank: int) -> None:
        """Marks ``rank`` as lost; later waits never blame it."""
        self._forgotten.add(rank)

    def read(self) -> list[Beat]:
        """Publishes a beat, and returns the last beat of each rank, by rank; updates :attr:`fault`.

        The beat of a forgotten rank is that of one that another rank has ended.

        Raises:
            RuntimeError: as :meth:`call`.
        """

        def read() -> list[Beat]:
            self._beat()
            return self._read()

        return self.call(read)

    def call(self, function: Callable[[], T], timeout_s: float | None = None) -> T:
        """Returns the result of ``function``, which calls the store, see [Note: only the heartbeat's thread ...].

        Raises:
            RuntimeError: the store does not answer within ``timeout_s`` seconds (None: :data:`STORE_S`), or has failed
                before.
        """
        return _in_time(function, STORE_S if timeout_s is None else timeout_s, self._submit)

    def tell(self, fault: Fault) -> None:
        """Publishes the rank at fault, and a beat of this rank; does not wait."""
        self._told = fault

        def tell() -> None:
            with suppress(Exception):
                self._store.set(_FAULT_KEY, json.dumps(asdict(fault)))
                self._beat()

        with suppress(RuntimeError):
            self._submit(tell)

    def close(self) -> None:
        """Publishes a last beat and ends the thread; waits at most :data:`GOODBYE_S` seconds."""
        self._jobs.put(None)
        join_thread(self._thread, GOODBYE_S)

    def _submit(self, job: Callable[[], None]) -> None:
        with self._lock:
            if self._ended:
                raise RuntimeError("The store does not answer any more.")
            self._jobs.put(job)

    def _run(self) -> None:
        with suppress(RuntimeError):  # the store is gone for good
            while True:
                self._beat()
                self._learn_fault()
                self._act_on_fault()
                self._listen()
                with suppress(queue.Empty):
                    if (job := self._jobs.get(timeout=self.interval)) is None:
                        break
                    job()
            self._beat()
        with self._lock:
            self._ended = True
        with suppress(queue.Empty):
            while True:  # who has queued a call waits for it
                if (job := self._jobs.get_nowait()) is not None:
                    job()

    def _beat(self) -> None:
        self._number += 1
        self._store.set(self._key, json.dumps(asdict(self._describe(self._number))))

    def _learn_fault(self) -> None:
        if self.fault is None and self._store.check([_FAULT_KEY]):
            self._told = _read_as(_fault_from, _FAULT_KEY, self._store.get(_FAULT_KEY))

    def _listen(self) -> None:
        """Reads the neighbor's beat, now and then, and rank 0's until there is one: it may run the store."""
        if self.first is None and (beat := self.last_beat(self._store, 0)).number:
            self.first = beat
        neighbor, now = self._neighbor, time.monotonic()
        if neighbor is not None and self.fault is None and neighbor.is_due(now):
            rank = neighbor.rank
            beat = Beat(left="") if rank in self._forgotten else self.last_beat(self._store, rank)
            if neighbor.hear(beat, now):
                self._on_silence(rank, beat)

    def _act_on_fault(self) -> None:
        fault, now = self.fault, time.monotonic()
        if fault is None or fault == self._acted_on:
            return
        if self._known is None or self._known[0] != fault:
            self._known = fault, now
        elif now - self._known[1] >= self.interval:
            self._acted_on = fault
            self._on_fault()

    def _read(self) -> list[Beat]:
        self._learn_fault()
        if self._store.check(self._keys):  # a query of a missing key would block
            values = zip(self._keys, self._store.multi_get(self._keys), strict=True)
            beats = [_read_as(_beat_from, key, value) or Beat() for key, value in values]
        else:
            beats = [self.last_beat(self._store, peer) for peer in range(len(self._keys))]
        return [Beat(left="", blames=peer) if peer in self._forgotten else beat for peer, beat in enumerate(beats)]


def call_in_time(function: Callable[[], T], timeout_s: float) -> T:
    """Returns the result of ``function``, which calls a store, in a thread of its own: where there is no heartbeat yet.

    Raises:
        RuntimeError: the store does not answer within ``timeout_s`` seconds, or fails.
    """
    return _in_time(function, timeout_s, lambda run: Thread(target=run, name="pipesync-store", daemon=True).start())


def _in_time(function: Callable[[], T], timeout_s: float, start: Callable[[Callable[[], None]], object]) -> T:
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(function())
        except Exception as error:
            answer.set_exception(error)

    start(run)
    try:
        return answer.result(timeout_s)
    except Exception as error:
        raise RuntimeError("The store does not answer.") from error


def _key_of(rank: int) -> str:
    return f"pipesync/beat/{rank}"


def _read_as(make: Callable[[dict[str, Any]], T], key: str, text: bytes) -> T | None:
    """Returns what a rank has published under a key; None, and a warning, if no rank has written that."""
    try:
        return make(json.loads(text))
    except (ValueError, TypeError, KeyError) as error:
        warnings.warn(
            f"The job's store has {text[:80]!r} under {key!r}, which no rank of this job writes "
            f"({type(error).__name__}: {error}), and which is ignored. Does another job, or an older version of this "
            "package, use the same store?",
            stacklevel=2,
        )
        return None


def _beat_from(values: dict[str, Any]) -> Beat:
    beat = Beat(**{**values, "waits": [Wait(**wait) for wait in values["waits"]]})
    if not all(isinstance(value, (int, float)) for value in (beat.number, beat.at, beat.exchanges)):
        raise TypeError("a number is none")
    return beat


def _fault_from(values: dict[str, Any]) -> Fault:
    fault = Fault(**values)
    if not (isinstance(fault.rank, int) and isinstance(fault.kind, str)):
        raise TypeError("rank is no number, or kind no text")
    return fault
