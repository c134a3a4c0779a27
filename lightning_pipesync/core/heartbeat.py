"""What every rank tells the others of itself through the job's store, so that one that is lost can be named.

[Note: nobody waits for the store]
A call to a store whose server is frozen may never return, whatever its timeout. All calls are made by the thread of the
heartbeat; who wants something of it waits for the thread, and only so long.
"""

from __future__ import annotations

import json
import queue
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from threading import Thread
from typing import Any

import torch.distributed as dist

#: Where the first fault that a rank has found is told to all.
_FAULT_KEY = "pipesync/fault"


@dataclass(frozen=True)
class Wait:
    """What a rank waits for.

    Attributes:
        what: in words.
        peer: the rank that has to act; None: any other.
        since: seconds since the start of the job's clock.
    """

    what: str
    peer: int | None
    since: float


@dataclass(frozen=True)
class Beat:
    """What a rank tells of itself.

    Attributes:
        number: of the beat; while it grows, the rank is alive. 0: it has never been heard of.
        at: seconds since the start of the job's clock.
        host: name of its machine.
        pid: of its process there.
        exchanges: operations that it has begun so far.
        waits: for what it waits now.
        blames: the rank because of which it has given up.
        left: None while it takes part; then the exception with which it has left, empty if there was none.
        lost_peer: whether that exception is one of a connection, so that another rank is the reason.
    """

    number: int = 0
    at: float = 0.0
    host: str = "unknown"
    pid: int = 0
    exchanges: int = 0
    waits: list[Wait] = field(default_factory=list)
    blames: int | None = None
    left: str | None = None
    lost_peer: bool = False


@dataclass(frozen=True)
class Fault:
    """Which rank is at fault, and how.

    Attributes:
        kind: a key of :data:`lightning_pipesync.core.diagnosis.SENTENCES`.
        rank: the rank.
        host: name of its machine.
        pid: of its process there.
        detail: what else is known.
        at: since when, in seconds since the start of the job's clock.
    """

    kind: str
    rank: int
    host: str
    pid: int
    detail: str
    at: float


class Heartbeat:
    """Tells of this rank, every ``interval`` seconds, and hears of a fault that another one has found.

    A beat is one message to the store and one question; what the other ranks tell is read on request only.

    Attributes:
        interval: seconds.
        fault: the last fault that a rank has told of.

    Args:
        store: whose keys nobody else uses.
        rank: of this process.
        world_size: number of ranks.
        interval: seconds.
        describe: makes the beat, whose number it is given.
    """

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, interval: float, describe: Callable[[int], Beat]
    ) -> None:
        self._store, self._describe = store, describe
        self._keys = [f"pipesync/beat/{peer}" for peer in range(world_size)]
        self._own_key = self._keys[rank]
        self.interval = interval
        self.fault: Fault | None = None
        self._number = 0
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = Thread(target=self._run, name="pipesync-heartbeat", daemon=True)
        self._thread.start()

    def read(self, timeout_s: float) -> list[Beat]:
        """Returns the last beat of each rank, by rank, this one's made now, and sets :attr:`fault`.

        Raises:
            RuntimeError: the store does not answer within ``timeout_s`` seconds, or not any more.
        """
        if not self._thread.is_alive():
            raise RuntimeError("The store does not answer any more.")
        answer: Future[list[Beat]] = Future()

        def read() -> None:
            try:
                self._beat()
                answer.set_result(self._read())
            except Exception as error:
                answer.set_exception(error)

        self._jobs.put(read)
        try:
            return answer.result(timeout_s)
        except Exception as error:
            raise RuntimeError("The store does not answer.") from error

    def tell(self, fault: Fault) -> None:
        """Tells all ranks which one is at fault, and this rank's beat with it; does not wait."""
        self.fault = fault

        def tell() -> None:
            with suppress(Exception):
                self._store.set(_FAULT_KEY, json.dumps(asdict(fault)))
                self._beat()

        self._jobs.put(tell)

    def close(self, timeout_s: float) -> None:
        """Tells of this rank for the last time and ends the thread; waits for that at most ``timeout_s`` seconds."""
        self._jobs.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        with suppress(Exception):  # the store is gone, and will not come back
            while True:
                self._beat()
                if self.fault is None and self._store.check([_FAULT_KEY]):
                    self.fault = Fault(**json.loads(self._store.get(_FAULT_KEY)))
                with suppress(queue.Empty):
                    if (job := self._jobs.get(timeout=self.interval)) is None:
                        break
                    job()
            self._beat()

    def _beat(self) -> None:
        self._number += 1
        self._store.set(self._own_key, json.dumps(asdict(self._describe(self._number))))

    def _read(self) -> list[Beat]:
        if self.fault is None and self._store.check([_FAULT_KEY]):
            self.fault = Fault(**json.loads(self._store.get(_FAULT_KEY)))
        if self._store.check(self._keys):  # asking for one that is not there would wait for it
            return [_beat_from(json.loads(value)) for value in self._store.multi_get(self._keys)]
        return [
            _beat_from(json.loads(self._store.get(key))) if self._store.check([key]) else Beat() for key in self._keys
        ]


def _beat_from(values: dict[str, Any]) -> Beat:
    return Beat(**{**values, "waits": [Wait(**wait) for wait in values["waits"]]})
