"""The error of a lost peer: which rank is at fault, and why.

[Note: no wait for a lost rank]
A rank that raises publishes it, and may live on, so that no connection to it breaks. A rank that learns of a fault, and
has not ended a beat later, ends all waits of its process groups with an error. Within that beat an error that all ranks
raise, such as a setting that is refused, ends them without breaking a group that a later training could use.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from os import getpid
from socket import gethostname
from typing import Any, TypeVar

import torch.distributed as dist
from typing_extensions import override

from lightning_pipesync.core.faults import heartbeat
from lightning_pipesync.core.faults.diagnosis import SENTENCES, fault_of, find_fault, has_raised
from lightning_pipesync.core.faults.errors import (
    add_last_line,
    cause_of,
    in_short,
    is_connection_error,
    is_lost_peer,
    is_normal_end,
    lost_peer_behind,
    mark_as_naming,
    names_rank,
)
from lightning_pipesync.core.faults.heartbeat import Beat, Fault, Heartbeat
from lightning_pipesync.core.faults.shutdown import (
    at_shutdown,
    call_if_uncaught,
    error_at_shutdown,
    is_store_of_agent,
    report_error_at_shutdown,
)
from lightning_pipesync.core.torch_private import address_of, store_of

T = TypeVar("T")

UNKNOWN = "No rank is known to be at fault: one has died, hangs, or is too slow"

#: Why a wait has ended that the watch has ended.
KNOWN = "the job's store says so"


class PeerWatch:
    """Publishes what this rank waits for, and names the rank at fault when a wait times out.

    Before :meth:`start` it names no rank.

    Attributes:
        timeout: after which a peer that does not answer counts as lost.
        ahead: what this rank has done that others may not have, in words, such as that it has ended its epoch.
        announces: whether a fault is printed, since this rank may be in a wait that only its end ends: NCCL's watchdog
            aborts the process, without an exception.
        survives_loss: whether the others go on without a silent rank, so that it is not published as the fault.

    Args:
        exchanges: returns the number of operations that this rank has started.
        end_waits: ends all waits of this rank with a connection error, see [Note: no wait for a lost rank].
    """

    def __init__(
        self, timeout: timedelta, exchanges: Callable[[], int] = int, end_waits: Callable[[], object] = lambda: None
    ) -> None:
        self.timeout, self._timeout_s = timeout, timeout.total_seconds()
        self._end_waits, self._has_ended_waits = end_waits, False
        self.ahead: str | None = None
        self.announces = self.survives_loss = False
        self._rank, self._exchanges = dist.get_rank(), exchanges
        self._begin = time.monotonic()
        self.waits: dict[int, Waiting] = {}  # by thread
        self._error: BaseException | None = None
        self._left = False
        self._diagnosing = threading.Lock()
        self._diagnosis: str | None = None
        self._heartbeat: Heartbeat | None = None

    def start(self, group: dist.ProcessGroup) -> None:
        """Starts the heartbeat and the job's clock; a collective call of all ranks in ``group``, which are connected.

        Raises:
            RuntimeError: the store does not answer.
        """
        self._begin = time.monotonic()
        if dist.get_world_size() > 1:
            store, size = store_of(group), dist.get_world_size()
            self._address = address_of(store)
            try:
                self._heartbeat = Heartbeat(
                    store, self._rank, size, self._timeout_s, self._describe, self._act_on_fault, self._find_silent
                )
            except RuntimeError as error:
                raise RuntimeError(f"{self._describe_store()}; rank {self._rank} has not joined it yet.") from error
            self._at_end = at_shutdown(lambda _: self.close(error_at_shutdown()), first=True)
            self._ignore_uncaught = call_if_uncaught(self.close)
            report_error_at_shutdown()

    def waiting(self, what: str, peer: int | None = None) -> Waiting:
        """Returns a context in which this rank waits for ``what``, of ``peer``, or any other rank if None."""
        return Waiting(self, what, peer)

    def failed_wait(self, what: str, peer: int | None, error: BaseException) -> RuntimeError:
        """Returns the error that names the rank at fault for the failed wait of the calling thread."""
        thread = threading.get_ident()
        is_published = thread in self.waits
        self.waits.setdefault(thread, Waiting(self, what, peer))
        try:
            return mark_as_naming(RuntimeError(self._explain(what, error)))
        finally:
            if not is_published:  # otherwise this rank, which may survive the loss, would seem to wait for ever
                del self.waits[thread]

    def ask_store(self, function: Callable[[], T]) -> T:
        """Returns the result of ``function``, which calls the store; after :meth:`start`, with several ranks.

        Raises:
            DistStoreError: the store does not answer.
        """
        assert self._heartbeat is not None
        try:
            return self._heartbeat.call(function, self._timeout_s)
        except RuntimeError as error:
            raise dist.DistStoreError(str(error)) from error

    def forget_rank(self, rank: int) -> None:
        """Marks ``rank`` as lost; later waits never blame it."""
        if self._heartbeat is not None:
            self._heartbeat.forget_rank(rank)
        with self._diagnosing:
            self._diagnosis = None

    @contextmanager
    def despite_loss(self) -> Iterator[None]:
        """Context that a wait for a lost peer ends quietly; the first one still raises, so that the loss is known."""
        known = self._diagnosis is not None or is_lost_peer(sys.exc_info()[1])
        try:
            yield
        except RuntimeError as error:
            if not (known and is_lost_peer(error)):
                raise

    def name_rank_in(self, error: BaseException) -> None:
        """Appends a line that names the rank at fault to an error that another rank has caused, unless it has one.

        So it does to an error of another library, and to one that was raised while such an error was handled.
        """
        cause = lost_peer_behind(error)
        if self._heartbeat is None or self._left or cause is None or names_rank(error):
            return
        if names_rank(cause):
            add_last_line(error, str(cause).splitlines()[-1])
            return
        what = "an operation outside of the method, such as one of the default process group"
        with self.waiting(what):
            line = self._explain(what, cause)
        add_last_line(error, line)

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Context whose errors get a last line, see :meth:`name_rank_in`."""
        try:
            yield
        except RuntimeError as error:
            self.name_rank_in(error)
            raise

    def close(self, error: BaseException | None = None) -> None:
        """Publishes that this rank has ended, with ``error`` or the one that is being handled; ends the thread.

        An error that another rank has caused gets a last line, see :meth:`name_rank_in`.
        """
        if self._heartbeat is None or self._left:
            return
        error = error or sys.exc_info()[1]
        if error is not None:
            self.name_rank_in(error)
        self._left, self._error = True, None if is_normal_end(error) else error
        last = self._describe(0)
        if has_raised(last) and self.fault is None:
            self._heartbeat.tell(fault_of("raised", self._rank, last))
            if self._rank == 0:
                self._wait_until_known({0})
        self._heartbeat.close()
        self._at_end.cancel()
        self._ignore_uncaught()

    def _act_on_fault(self) -> None:
        if not self._left:
            if self.announces and self.fault is not None:
                print(f"{self._describe_fault(self.fault)}; rank {self._rank} ends.", file=sys.stderr, flush=True)
            self._has_ended_waits = True
            self._end_waits()

    def _find_silent(self, rank: int, beat: Beat) -> None:
        if self._heartbeat is not None and not self.survives_loss:
            self._heartbeat.tell(fault_of("silent" if beat.number else "missing", rank, beat))

    def _explain(self, what: str, error: BaseException) -> str:
        with self._diagnosing:  # each thread that waits fails; one diagnosis is enough
            if self._diagnosis is None:
                self._diagnosis = self._diagnose()
            fault = self._diagnosis
        why = f"timeout_s={self._timeout_s:g}; {KNOWN if self._has_ended_waits else cause_of(error)}"
        return f"{fault}; rank {self._rank} waited for {what} ({why})."

    def _diagnose(self) -> str:
        """Returns in words which rank is at fault; publishes it."""
        if self._heartbeat is None:
            return UNKNOWN
        silent: set[int] = set()
        try:
            beats = self._heartbeat.read()
            if self.fault is None:
                beats, silent = self._listen(beats)
        except RuntimeError:
            if self.fault is not None:
                return self._describe_fault(self.fault)
            return UNKNOWN if self._left else self._describe_store()
        told = self.fault
        fault = told or find_fault(beats, silent, self._rank, self._heartbeat.interval)
        if isinstance(fault, str):
            return UNKNOWN + fault
        if told is None:
            self._heartbeat.tell(fault)
        if self._rank == 0:
            self._wait_until_known(silent | {fault.rank})
        return self._describe_fault(fault)

    def _listen(self, first: list[Beat]) -> tuple[list[Beat], set[int]]:
        """Waits for a beat of each rank after ``first``; returns the last beats and the silent ranks."""
        for beats in self._later_beats():
            pairs = enumerate(zip(first, beats, strict=True))
            silent = {rank for rank, (before, now) in pairs if now.number == before.number and now.left is None}
            if not silent or self.fault is not None:
                break
        return beats, silent

    def _wait_until_known(self, lost: Collection[int]) -> None:
        """Waits until all ranks but ``lost`` know the fault: this process may run the store, and will end."""
        with suppress(RuntimeError):  # the store does not answer: no rank can learn of it any more
            for beats in self._later_beats():
                live = (beat for rank, beat in enumerate(beats) if rank not in lost)
                if all(beat.blames is not None or beat.left is not None for beat in live):
                    break

    def _later_beats(self) -> Iterator[list[Beat]]:
        """Yields the last beats repeatedly, until each live rank has had the time to publish one."""
        assert self._heartbeat is not None
        deadline = time.monotonic() + heartbeat.PATIENCE * self._heartbeat.interval
        while True:
            time.sleep(self._heartbeat.interval / 10)
            yield self._heartbeat.read()
            if time.monotonic() > deadline:
                return

    def _describe_fault(self, fault: Fault) -> str:
        sentence = SENTENCES[fault.kind].format(detail=fault.detail, ago=max(0.0, self.now() - fault.at))
        where = f" (host {fault.host}, pid {fault.pid})" if fault.pid else ""
        return f"Rank {fault.rank}{where} is at fault: {sentence}"

    def _describe_store(self) -> str:
        where = "" if self._address is None else f" at {self._address}"
        if self._rank == 0 or is_store_of_agent():
            return (
                f"The store of the job{where} does not answer: look first at that machine, where rank 0 runs; its "
                "process has ended, has died or is frozen, or the network is down"
            )
        return (
            f"Rank 0 is at fault: the store of the job{where}, which it runs, does not answer; it has ended, has died "
            "or is frozen, or the network is down"
        )

    def _describe(self, number: int) -> Beat:
        error = self._error
        return Beat(
            number,
            self.now(),
            gethostname(),
            getpid(),
            exchanges=self._exchanges(),
            awaits=[waiting.peer for waiting in list(self.waits.values())],
            blames=None if self.fault is None else self.fault.rank,
            left=None if not self._left else "" if error is None else in_short(error),
            ahead=self.ahead,
            lost_peer=error is not None and is_lost_peer(error),
        )

    @property
    def is_open(self) -> bool:
        return not self._left

    @property
    def fault(self) -> Fault | None:
        return None if self._heartbeat is None else self._heartbeat.fault

    def now(self) -> float:
        """Returns the seconds since the start of the job's clock."""
        return time.monotonic() - self._begin


def waiting_for_all(watch: PeerWatch | None) -> AbstractContextManager[object]:
    """Returns a context in which this rank waits for all others in the default process group; None: nobody is told."""
    return nullcontext() if watch is None else watch.waiting("all ranks, in the default process group")


def waits_for_all(watch: str, *names: str) -> Callable[[type[T]], type[T]]:
    """Class decorator: the inherited methods ``names`` run within :func:`waiting_for_all`.

    Args:
        watch: the name of the attribute that is the watch, or None.
        names: of methods of a library's class.
    """

    def wrapped(cls: type[Any], name: str) -> Callable[..., Any]:
        def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
            with waiting_for_all(getattr(self, watch)):
                return getattr(super(cls, self), name)(*args, **kwargs)

        wait.__name__, wait.__qualname__ = name, f"{cls.__qualname__}.{name}"
        return override(wait)

    def decorate(cls: type[T]) -> type[T]:
        for name in names:
            setattr(cls, name, wrapped(cls, name))
        return cls

    return decorate


class Waiting:
    """A context in which a thread waits; a connection error becomes one that names the rank at fault.

    A class, for speed. ``what`` and ``peer`` may change within it, so that many messages need one. Not published if
    ``ahead``: a thread waits before the rank needs it.
    """

    __slots__ = ("_ahead", "_outer", "_watch", "peer", "what")

    def __init__(self, watch: PeerWatch, what: str, peer: int | None, ahead: bool = False) -> None:
        self._watch, self.what, self.peer, self._ahead = watch, what, peer, ahead
        self._outer: Waiting | None = None

    def __enter__(self) -> Waiting:
        waits, thread = self._watch.waits, threading.get_ident()
        self._outer = waits.get(thread)
        if not self._ahead:
            waits[thread] = self
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            if isinstance(error, RuntimeError) and is_connection_error(error):
                raise self._watch.failed_wait(self.what, self.peer, error) from error
        finally:
            waits, thread = self._watch.waits, threading.get_ident()
            waits.pop(thread, None)
            if self._outer is not None:
                waits[thread] = self._outer
