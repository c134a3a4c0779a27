"""The members of a job: which ranks are left, agreed through the job's store.

[Note: agreement on the members]
The ranks pass through numbered sections; each completes a section when it has all other ranks' data of it. A rank that
finds a section broken reports how many it has completed. Rank 0 leads: when each member has reported, or has fallen
silent, it publishes who remains, and the fewest sections that one of them has completed. All that have completed more
undo the last one. No two members differ by more than one, as a section needs all of them.

A process that takes a lost rank's place applies for it (:class:`Application`), and the leader adds it to the members of
an agreement that all of them ask for.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TypeVar

import torch.distributed as dist

from lightning_pipesync.core.faults.heartbeat import Beat, Heartbeat, interval_of
from lightning_pipesync.core.faults.shutdown import at_shutdown

#: The rank that decides.
LEADER = 0

#: The number of beats after which a rank that has not published one counts as lost. More than when a fault is only
#: named, as such a rank cannot return.
PATIENCE = 10

T = TypeVar("T")


@dataclass(frozen=True)
class Agreement:
    """What the leader has decided. Ranks are those that the members had at first."""

    ranks: list[int]  # the members that remain, in ascending order
    completed: int  # the number of sections that all of them have completed
    lost: dict[int, str]  # the members that do not remain, each with its host and process id in words
    joined: dict[int, str]  # the members that need what the others know, with the same words
    generation: int  # the number of this agreement

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Agreement:
        values = json.loads(text)
        described = {name: {int(rank): where for rank, where in values[name].items()} for name in ("lost", "joined")}
        return cls(**{**values, **described})


class Membership:
    """The members of a job, by the ranks that they had at first; see [Note: agreement on the members].

    Attributes:
        ranks: the members, in ascending order.
        generation: the number of agreements so far.

    Args:
        store: outlives process groups; nothing else uses its keys.
        world_size: the number of ranks at first.
        timeout_s: seconds after which a living member that has not reported counts as lost.
        joins: the agreement by which this rank joins the others; None: it is a member from the beginning.
    """

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, timeout_s: float, joins: Agreement | None = None
    ) -> None:
        self.ranks, self.generation = list(range(world_size)), 0
        if joins is not None:
            self.ranks, self.generation = joins.ranks, joins.generation
        self._store, self._rank, self._timeout_s = store, rank, timeout_s
        self._left: str | None = None
        self._last_beat, self._longest_gap = time.monotonic(), 0.0
        self._interval = interval_of(timeout_s)
        self._heartbeat = Heartbeat(store, rank, world_size, self._interval, self._describe)
        self._at_end = at_shutdown(lambda _: self.close(), first=True)

    def agree(self, completed: int, joined: Mapping[int, str] | None = None) -> Agreement | None:
        """Reports that this rank needs a new group, and returns what is agreed; blocks.

        Args:
            completed: the number of sections that this rank has completed.
            joined: on the leader, the ranks that join, or have joined and may not know what the others know, each with
                its host and process id in words.

        Returns:
            None if the leader, or the store, does not answer, or this rank is the leader and was cut off from all.

        Raises:
            RuntimeError: the others continue without this rank.
        """
        self.generation += 1
        try:
            self.call(lambda: self._store.set(self._report_key(self._rank), str(completed)))
            agreement = self._decide(joined or {}) if self._rank == LEADER else self._await_agreement()
        except RuntimeError:  # of the store
            agreement = None
        if agreement is None:
            self.close()
            return None
        if self._rank not in agreement.ranks:
            self.close()
            raise RuntimeError(
                f"Rank {self._rank} did not answer in time, and counts as lost (timeout_s={self._timeout_s:g}): rank "
                f"{', '.join(map(str, agreement.ranks))} continue without it, and its weights are out of date. "
                "End this process; to take part again, restart the job from a checkpoint."
            )
        self.ranks = agreement.ranks
        return agreement

    def forget_pauses(self) -> None:
        """Forgets pauses of this process: it has heard from others since, or has waited for the store."""
        self._longest_gap, self._last_beat = 0.0, time.monotonic()

    def close(self) -> None:
        """Publishes that this rank has left, and ends the thread."""
        if self._left is None:
            self._left = ""
            self._heartbeat.close()
            self._at_end.cancel()

    def _decide(self, joined: Mapping[int, str]) -> Agreement | None:
        """Publishes the agreement once each member has reported or is lost.

        Returns:
            None if no other member is left and this process was frozen: it counts as lost for the others.
        """
        deadline = time.monotonic() + self._timeout_s
        silence = Silence(PATIENCE * self._interval)
        while True:
            silent = silence.of(beats := self._heartbeat.read())
            reports = {rank: report for rank in self.ranks if (report := self._read(self._report_key(rank)))}
            live = [rank for rank in self.ranks if rank not in silent]
            if all(rank in reports for rank in live) or time.monotonic() > deadline:
                break
            time.sleep(self._interval / 4)
        members = [rank for rank in live if rank in reports]
        if members == [LEADER] and self._longest_gap > PATIENCE * self._interval:
            return None
        lost = {r: f"host {beats[r].host}, pid {beats[r].pid}" for r in self.ranks if r not in members}
        completed = min(int(reports[rank]) for rank in members)
        joined = {rank: where for rank, where in joined.items() if rank in members or rank not in self.ranks}
        agreement = Agreement(sorted({*members, *joined}), completed, lost, joined, self.generation)
        self.call(lambda: self._store.set(self._agreement_key, agreement.to_json()))
        return agreement

    def _await_agreement(self) -> Agreement | None:
        # The leader may compute for as long as the timeout, and then wait for another member for as long again.
        deadline = time.monotonic() + 2 * (self._timeout_s + PATIENCE * self._interval)
        silence = Silence(PATIENCE * self._interval)
        while not (found := self._read(self._agreement_key)):
            if LEADER in silence.of(self._heartbeat.read()) or time.monotonic() > deadline:
                return None
            time.sleep(self._interval / 4)
        return Agreement.from_json(found)

    def _report_key(self, rank: int) -> str:
        return f"pipesync/report/{self.generation}/{rank}"

    @property
    def _agreement_key(self) -> str:
        return f"pipesync/agreement/{self.generation}"

    def _read(self, key: str) -> str | None:
        return self.call(lambda: self._store.get(key).decode() if self._store.check([key]) else None)

    def call(self, function: Callable[[], T]) -> T:
        """Returns the result of ``function``, which calls the store, see :meth:`Heartbeat.call`."""
        return self._heartbeat.call(function)

    def _describe(self, number: int) -> Beat:
        now = time.monotonic()
        self._longest_gap = max(self._longest_gap, now - self._last_beat)
        self._last_beat = now
        return Beat.of_this_process(number, left=self._left)


class Silence:
    """Which ranks have left, or have not published a beat for ``patience_s`` seconds since it was first asked."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._heard: dict[int, tuple[int, float]] = {}  # number of the last beat, and when it was first seen

    def of(self, beats: list[Beat]) -> set[int]:
        now = time.monotonic()
        for rank, beat in enumerate(beats):
            if rank not in self._heard or self._heard[rank][0] != beat.number:
                self._heard[rank] = (beat.number, now)
        return {
            rank
            for rank, beat in enumerate(beats)
            if beat.left is not None or now - self._heard[rank][1] > self._patience_s
        }
