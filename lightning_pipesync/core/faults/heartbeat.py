"""Heartbeats: each rank publishes its state in the job's store, so that a lost rank can be named.

[Note: only the heartbeat's thread calls the store]
A call to a store whose server is frozen may never return, whatever its timeout. So the heartbeat's thread makes all
calls, and other threads wait for it with a timeout.

[Note: each listens to the next]
A frozen process breaks no connection, and ranks that wait for it in another library's collective would wait for as long
as that group allows. So each rank listens for the beats of the next one, or of the one after that if it has ended: one
query at a time, whatever the number of ranks. Of several silent ranks, one comes after a rank that is not, and the
fault of one ends the waits of all.
"""

from __future__ import annotations

import json
import math
import queue
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from threading import Thread
from typing import TypeVar

import torch.distributed as dist

from lightning_pipesync.core.faults.shutdown import join_thread

#: The key of the fault that a rank has told last.
_FAULT_KEY = "pipesync/fault"

#: Maximum seconds between two beats, and their maximum as a fraction of the timeout.
INTERVAL, FRACTION_OF_TIMEOUT = 1.0, 1 / 8

#: The number of beats that a rank may miss before it counts as silent.
PATIENCE = 3

#: How often a rank listens to the next one, as a fraction of the timeout, and the maximum in seconds.
LISTEN_FRACTION, LISTEN_S = 1 / 8, 10.0

#: Seconds that a caller waits for the store, unless it says how long.
STORE_S = 5.0

#: Maximum seconds that :meth:`Heartbeat.close` waits.
GOODBYE_S = 1.0

T = TypeVar("T")


@dataclass(frozen=True)
class Beat:
    """The state of a rank, as it publishes it."""

    number: int = 0  # grows while the rank is alive; 0: it has not published any
    at: float = 0.0  # seconds since the start of the job's clock
    host: str = "unknown"
    pid: int = 0
    exchanges: int = 0  # the number of operations that it has started
    awaits: list[int | None] = field(default_factory=list)  # the ranks that it waits for now; None: all others
    blames: int | None = None  # the rank that it has found at fault
    left: str | None = None  # None while it takes part; then the exception that it ended with, empty if there was none
    ahead: str | None = None  # what it has done that others may not have, in words
    lost_peer: bool = False  # whether another rank has caused that exception


@dataclass(frozen=True)
class Fault:
    """The rank at fault, and the kind of fault."""

    kind: str  # a key of :data:`lightning_pipesync.core.faults.diagnosis.SENTENCES`
    rank: int
    host: str
    pid: int
    detail: str  # the exception, or the number of operations
    at: float  # when it happened, in seconds since the start of the job's clock


class Neighbor:
    """The next rank, in a ring, that has not ended, see [Note: each listens to the next].

    Args:
        rank: this rank.
        timeout_s: seconds of silence after which a rank counts as lost.
    """

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        self._rank, self._world_size, self._timeout_s = rank, world_size, timeout_s
        self._every_s = min(LISTEN_S, timeout_s * LISTEN_FRACTION)
        self._last_heard = -math.inf  # by the clock of the caller
        self._number, self._silent_s = -1, 0.0
        self.rank = rank
        self._pass_on()

    def is_due(self, now: float) -> bool:
        """Returns whether :meth:`hear` is to be called, at ``now`` seconds; never, if all others have ended."""
        return self.rank != self._rank and now >= self._last_heard + self._every_s

    def hear(self, beat: Beat, now: float) -> bool:
        """Takes the last beat of :attr:`rank`; returns whether it has been silent for the timeout.

        Of the time since the last call, as much counts as is usual: this process may have been frozen itself.
        """
        elapsed, self._last_heard = min(now - self._last_heard, 2 * self._every_s), now
        if beat.left is not None:
            self._pass_on()
            return False
        self._silent_s = self._silent_s + elapsed if beat.number == self._number else 0.0
        self._number = beat.number
        return self._silent_s >= self._timeout_s

    def _pass_on(self) -> None:
        self.rank = (self.rank + 1) % self._world_size
        self._number, self._silent_s = -1, 0.0


class Heartbeat:
    """Publishes this rank's state every ``interval`` seconds, and learns of a fault that another rank has found.

    A beat is one write to the store and one query; the other ranks' beats are read on request only, except for the
    next rank's.

    Args:
        store: nothing else uses its keys.
        timeout_s: seconds of silence after which a rank counts as lost.
        describe: returns this rank's beat, given its number.
        on_fault: called once a fault has been known for the time of a beat.
        on_silence: called with the rank, and its last beat, when the next rank has fallen silent.

    Raises:
        RuntimeError: the store does not answer within ``timeout_s`` seconds.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout_s: float,
        describe: Callable[[int], Beat],
        on_fault: Callable[[], object],
        on_silence: Callable[[int, Beat], object],
    ) -> None:
        self._store, self._describe, self._on_fault, self._on_silence = store, describe, on_fault, on_silence
        self.interval = min(INTERVAL, timeout_s * FRACTION_OF_TIMEOUT)
        self._neighbor = Neighbor(rank, world_size, timeout_s + PATIENCE * self.interval)
        self._keys = [f"pipesync/beat/{peer}" for peer in range(world_size)]
        self._rank, self._number = rank, 0
        self._told: Fault | None = None
        self._known: tuple[Fault | None, float] = None, 0.0  # the last fault, and when this thread learned of it
        self._forgotten: set[int] = set()
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._closing = self._answers = False  # whether the store answers; it may never again once it does not
        self._thread = Thread(target=self._run, name="pipesync-heartbeat", daemon=True)
        self._thread.start()
        try:
            self.call(self._begin, timeout_s)  # the store is slow when many ranks ask at the same time
        except RuntimeError:
            self._closing = True
            join_thread(self._thread, 0.0)
            raise

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
            self._learn_fault()
            return self._last_beats(range(len(self._keys)))

        return self.call(read)

    def call(self, function: Callable[[], T], timeout_s: float | None = None) -> T:
        """Returns the result of ``function``, which calls the store, see [Note: only the heartbeat's thread ...].

        Raises:
            RuntimeError: the store does not answer within ``timeout_s`` seconds (None: :data:`STORE_S`), or fails.
        """
        answer: Future[T] = Future()

        def call() -> None:
            try:
                answer.set_result(function())
            except Exception as error:
                answer.set_exception(error)

        if not self._thread.is_alive():
            raise RuntimeError("This rank has ended its heartbeat.")
        self._jobs.put(call)
        try:
            return answer.result(STORE_S if timeout_s is None else timeout_s)
        except Exception as error:
            raise RuntimeError("The store does not answer.") from error

    def tell(self, fault: Fault) -> None:
        """Publishes the rank at fault, and a beat of this rank; does not wait."""
        self._told = fault

        def tell() -> None:
            with suppress(Exception):
                self._store.set(_FAULT_KEY, json.dumps(asdict(fault)))
                self._beat()

        self._jobs.put(tell)

    def close(self) -> None:
        """Publishes a last beat and ends the thread; waits at most :data:`GOODBYE_S` seconds."""

        def end() -> None:
            self._closing = True

        self._jobs.put(end)
        join_thread(self._thread, GOODBYE_S)

    def _begin(self) -> None:
        # A later watch of the same process, also in a later group if an agent keeps the store, has other keys.
        number = self._store.add(f"pipesync/watches/{self._rank}", 1)
        self._store, self._answers = dist.PrefixStore(f"pipesync/{number}", self._store), True

    def _run(self) -> None:
        self._jobs.get()()
        while not self._closing:
            if self._answers:
                try:
                    self._beat()
                    self._learn_fault()
                    self._act_on_fault()
                    self._listen()
                except RuntimeError:
                    self._answers = False
            with suppress(queue.Empty):
                self._jobs.get(timeout=self.interval)()
        if self._answers:
            with suppress(RuntimeError):
                self._beat()

    def _beat(self) -> None:
        self._number += 1
        self._store.set(self._keys[self._rank], json.dumps(asdict(self._describe(self._number))))

    def _last_beats(self, ranks: Sequence[int]) -> list[Beat]:
        beats = zip(ranks, self._read([self._keys[rank] for rank in ranks], Beat), strict=True)
        return [Beat(left="", blames=rank) if rank in self._forgotten else beat or Beat() for rank, beat in beats]

    def _learn_fault(self) -> None:
        if self.fault is None:
            self._told = self._read([_FAULT_KEY], Fault)[0] or self._told

    def _listen(self) -> None:
        now = time.monotonic()
        if self.fault is None and self._neighbor.is_due(now):
            rank = self._neighbor.rank
            [beat] = self._last_beats([rank])
            if self._neighbor.hear(beat, now):
                self._on_silence(rank, beat)

    def _act_on_fault(self) -> None:
        fault, now = self.fault, time.monotonic()
        if fault != self._known[0]:
            self._known = fault, now
        elif fault is not None and now - self._known[1] >= self.interval:
            self._known = fault, math.inf  # acts on it once
            self._on_fault()

    def _read(self, keys: list[str], cls: type[T]) -> list[T | None]:
        """Returns what ranks have published under keys; None where there is nothing that a rank has written."""
        # A query of a missing key would block; one of all keys serves many ranks.
        present = keys if self._store.check(keys) else [key for key in keys if self._store.check([key])]
        texts = dict(zip(present, self._store.multi_get(present), strict=True))
        return [_parsed(key, texts[key], cls) if key in texts else None for key in keys]


def _parsed(key: str, text: bytes, cls: type[T]) -> T | None:
    try:
        return cls(**json.loads(text))
    except (ValueError, TypeError) as error:
        warnings.warn(
            f"The job's store has {text[:80]!r} under {key!r}, which no rank of this job writes "
            f"({type(error).__name__}: {error}), and which is ignored. Does another job, or an older version of this "
            "package, use the same store?",
            stacklevel=2,
        )
        return None
