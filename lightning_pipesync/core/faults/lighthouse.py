"""Which replicas are there: torchft's lighthouse, asked at each round.

A replica is a job of its own, in one process or several. It tells the lighthouse that it is alive, and at each round
asks for a quorum: the replicas that take part in the round. The lighthouse answers when all that are alive have asked,
or when they have been waited for long enough, all with the same answer.
"""

from __future__ import annotations

import math
import os
import re
import socket
import threading
import time
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any
from uuid import uuid4

from lightning_pipesync.core.extras import check_extra
from lightning_pipesync.core.faults.shutdown import AFTER_ERROR_S, at_shutdown, join_thread

#: Seconds between two signs of life; the lighthouse waits for some of them before a replica counts as dead.
INTERVAL_S = 0.5

#: Seconds without a sign of life after which a lighthouse counts a replica as lost, unless it is told others.
SILENCE_S = 5.0

#: Seconds that a connection, or a sign of life, takes at most.
CONNECT_S = 5.0

#: Seconds after which a question is asked again: longer than any is likely to wait. One that has timed out counts
#: nevertheless, and this replica would miss an answer that comes before it asks again: the others would leave it out.
#: A lighthouse that is lost meanwhile ends its connections.
QUESTION_S = 3600.0

#: Seconds in which what a replica says when it leaves reaches the lighthouse.
LAST_WORD_S = 1.0

#: Seconds in which all that live tell a lighthouse so that was started again; it would answer without them before.
ALL_BEAT_S = 3.0

#: The variables with this job's name among the replicas, where the lighthouse is, and with how many replicas the
#: training begins; ``pipesync launch`` sets them, as do the files for other launchers.
NAME, ADDRESS, NUMBER = "PIPESYNC_REPLICA", "PIPESYNC_LIGHTHOUSE", "PIPESYNC_NUM_REPLICAS"


@dataclass(frozen=True)
class Standing:
    """Where a replica stands, as it tells the others when it asks for a quorum."""

    completed: int = 0  # the number of rounds of which it has all data
    generation: str = ""  # of the last quorum in which it has taken part; empty: it is new
    undoable: bool = False  # whether it can undo the last round, as it does not know that all others have it
    connected: bool = False  # whether it has a group with the others of that quorum
    joins: bool = False  # whether it is about to begin, and not at the end of a step
    ends: bool = False  # whether it asks for the last time, at the end of its training
    steps: list[int] = field(default_factory=list)  # of each optimizer
    steps_after: int = -1  # after how many rounds it has taken its last steps
    shared_by: tuple[str, ...] = ()  # the ids of those who had a share of the data in these steps
    data: list[dict[str, Any]] = field(default_factory=list)  # what its data have in common with the others', by loader
    last: int = -1  # the number of the last round in which it takes part, as it leaves; -1: it stays


@dataclass(frozen=True)
class Member:
    """A replica in a quorum."""

    id: str  # no two processes have the same
    host: str
    pid: int
    stores: list[str]  # host:port of the store of each of its ranks, where those of a quorum can meet
    standing: Standing

    @property
    def described(self) -> str:
        return f"replica {self.id.partition('/')[0].lstrip('0') or 0} (host {self.host}, pid {self.pid})"


@dataclass(frozen=True)
class Quorum:
    """The replicas that take part in a round, in the order of their names."""

    members: list[Member]
    generation: str  # of no other quorum, and later ones sort behind earlier ones


class Lighthouse:
    """Asks a lighthouse, and tells it that this replica is alive.

    It does so until :meth:`close`, and as long as the training goes on: a call of :meth:`ask` or :meth:`go_on` is not
    longer ago than the timeout.

    Attributes:
        id: this replica among all others: its name, and what no other process has.
        was_silent: whether it has given no sign of life for so long that it may have counted as lost; see :meth:`ask`.

    Args:
        address: ``host:port`` of the lighthouse.
        stores: ``host:port`` of the stores of this replica's ranks.
        timeout_s: seconds after which a lighthouse that does not answer counts as lost, and so does a replica.

    Raises:
        ModuleNotFoundError: torchft is not installed.
        RuntimeError: the lighthouse does not answer.
    """

    def __init__(self, address: str, stores: list[str], timeout_s: float) -> None:
        check_extra("torchft", f"lighthouse={address!r}")
        os.environ.setdefault("RUST_LOG", "warn")  # it logs each question otherwise

        from torchft.coordination import LighthouseClient

        self._make = lambda: LighthouseClient(f"http://{address}", timedelta(seconds=CONNECT_S))
        self._address, self._timeout_s = address, timeout_s
        name = os.environ.get(NAME, "")
        # Numbers sort as such.
        self.id = f"{name.zfill(6) if name.isdigit() else name}/{socket.gethostname()}/{os.getpid()}/{uuid4().hex[:8]}"
        self._described = {"host": socket.gethostname(), "pid": os.getpid(), "stores": stores}
        self._client: Any = self._connect()
        self._ended = threading.Event()
        self._beaten, self.was_silent = time.monotonic(), False
        self._answers_since = -math.inf  # the lighthouse, without interruption; inf: it does not answer now
        self.go_on()
        self._thread = threading.Thread(target=self._beat, name="pipesync-lighthouse", daemon=True)
        self._thread.start()
        self._at_end = at_shutdown(lambda _: self.close(), first=True)

    def ask(self, standing: Standing, deadline: float = math.inf) -> Quorum | None:
        """Returns the replicas that take part in the next round, this one included; waits for the others.

        Returns None if they have not come by ``deadline``, of ``time.monotonic``; then call :meth:`leave`.

        Raises:
            RuntimeError: the lighthouse does not answer.
        """
        told = self._told(standing)
        self._note_silence()
        while True:
            self._wait_until_all_beat(deadline)
            try:
                answer = self._answer(told, deadline)
            except TimeoutError:  # the others have not asked yet
                continue
            except RuntimeError:  # the lighthouse has ended, and may be started anew; or it cannot be reached
                self._client = self._connect(since=self._beaten)
                self._answers_since = time.monotonic()
                continue
            if answer is None:
                return None
            members = [Member(each.replica_id, **_read(each.data)) for each in answer.participants]
            created = f"{answer.created.seconds:012d}.{answer.created.nanos:09d}"
            number = 1 + max(int(each.standing.generation.partition("/")[0] or 0) for each in members)
            return Quorum(sorted(members, key=lambda each: each.id), f"{number:08d}/{created}")

    def go_on(self) -> None:
        """Notes that the training goes on."""
        self._last = time.monotonic()

    def leave(self, standing: Standing) -> None:
        """Tells the others where this replica stands as it leaves, so that they do not wait for it; then :meth:`close`.

        The question takes the place of this replica in their next quorum, though nobody waits for the answer here.
        """
        self.close()
        with suppress(RuntimeError, TimeoutError):
            # By another client, as an earlier question may wait for its answer.
            self._make().quorum(self.id, timedelta(seconds=LAST_WORD_S), data=self._told(standing))

    def close(self) -> None:
        """Tells no more that this replica is alive.

        Waits for a call that does so: one that returns while the interpreter stops aborts the process.
        """
        self._ended.set()
        self._at_end.cancel()
        join_thread(self._thread, AFTER_ERROR_S)

    def _note_silence(self) -> None:
        self.was_silent |= time.monotonic() - self._beaten > SILENCE_S

    def _told(self, standing: Standing) -> dict[str, Any]:
        return {**self._described, "standing": asdict(standing)}

    def _answer(self, told: dict[str, Any], deadline: float) -> Any:
        """Asks on another thread: the call is not interrupted by Ctrl-C. Returns None after the deadline.

        Raises:
            RuntimeError: the connection has ended; or no sign of life has reached the lighthouse for the timeout, as
                where the link to it is cut, which no connection tells.
        """
        answer: Future[Any] = Future()

        def ask() -> None:
            try:
                answer.set_result(self._client.quorum(self.id, timedelta(seconds=QUESTION_S), data=told))
            except (RuntimeError, TimeoutError) as error:
                answer.set_exception(error)

        threading.Thread(target=ask, name="pipesync-quorum", daemon=True).start()
        while not wait([answer], INTERVAL_S).done:
            self.go_on()
            if time.monotonic() > deadline:
                return None
            if self._answers_since == math.inf and time.monotonic() - self._beaten > self._timeout_s:
                raise RuntimeError("no sign of life has reached the lighthouse")
        return answer.result()

    def _wait_until_all_beat(self, deadline: float) -> None:
        """Waits a moment after the lighthouse was started again: it does not know yet of others that live."""
        deadline = min(deadline, time.monotonic() + self._timeout_s)
        while time.monotonic() < min(self._answers_since + ALL_BEAT_S, deadline):
            self.go_on()
            if self._answers_since == math.inf:
                self._connect()
            time.sleep(INTERVAL_S / 5)

    def _connect(self, since: float = math.inf) -> Any:
        """Returns a client of the lighthouse, as soon as it answers; ``since``: when it did so last, if it has."""
        deadline = min(since, time.monotonic()) + self._timeout_s
        while True:
            try:
                return self._make()
            except RuntimeError as error:
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"The lighthouse at {self._address} has not answered for timeout_s={self._timeout_s:g}: start "
                        "it with `pipesync lighthouse`, or see whether its host can be reached. "
                        f"({re.sub(' within timeout.*', '', str(error))})"
                    ) from error
                time.sleep(INTERVAL_S)

    def _beat(self) -> None:
        client = None
        while not self._ended.wait(INTERVAL_S if client else 0):
            if time.monotonic() - self._last > self._timeout_s:
                continue
            try:
                client = client or self._make()
                client.heartbeat(self.id, timedelta(seconds=CONNECT_S))
                self._note_silence()
                self._beaten = time.monotonic()
                self._answers_since = min(self._answers_since, time.monotonic())
            except (RuntimeError, TimeoutError):
                self._answers_since = math.inf


def _read(data: dict[Any, Any]) -> dict[str, Any]:
    standing = {**data["standing"], "shared_by": tuple(data["standing"]["shared_by"])}
    return {**data, "standing": Standing(**standing)}
