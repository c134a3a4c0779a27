"""How a process takes the place of a lost rank in a running job, through the job's store.

[Note: new and returning processes]
A process that starts counts itself in the store. The first one of its rank makes process groups with the others. A
later one takes the place of the first, which is lost. It makes a group with itself alone, in which a method attaches,
and applies for admission: it publishes beats under keys of applicants, as those of its rank are its predecessor's. When
all members can admit it, the leader looks for living applicants, and writes them the agreement that makes them members
(:class:`Membership`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_pipesync.core.faults.heartbeat import Beat, Heartbeat, interval_of
from lightning_pipesync.core.faults.membership import LEADER, PATIENCE, Agreement, Silence
from lightning_pipesync.core.faults.shutdown import at_shutdown

#: Maximum number of beats that the leader waits for an applicant's next one.
LISTENED = 3


@dataclass(frozen=True)
class Job:
    store: dist.Store  # outlives process groups; nothing else uses its keys
    rank: int
    world_size: int  # at first
    start: int  # the number of processes that have started with this rank, including this one

    @property
    def is_replacement(self) -> bool:
        return self.start > 1


def start_job(timeout_s: float) -> Job:
    """Initializes the default process group, with Gloo, from the environment variables that ``torchrun`` sets.

    It has all ranks, or this rank alone if the process returns to a running job.

    Raises:
        ValueError: an environment variable is missing.
    """
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    job = Job(dist.PrefixStore("pipesync/job", store), rank, world_size, store.add(f"pipesync/job/starts/{rank}", 1))
    if job.is_replacement:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        first = dist.PrefixStore("groups/first", job.store)
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", store=first, rank=rank, world_size=world_size, timeout=timeout)
    return job


class Application:
    """A process's application for the place of a lost rank."""

    def __init__(self, job: Job, timeout_s: float) -> None:
        self._job = job
        self._interval = interval_of(timeout_s)
        store = dist.PrefixStore(_key_of(job.rank, job.start), job.store)
        self._heartbeat = Heartbeat(store, job.rank, job.world_size, self._interval, Beat.of_this_process)
        self._at_end = at_shutdown(lambda _: self._close(), first=True)

    def wait(self) -> Agreement:
        """Blocks until the members admit this rank; raises a RuntimeError if the leader has ended or is lost."""
        silence = Silence(PATIENCE * self._interval)
        try:
            while (text := self._heartbeat.call(self._read)) is None:
                leader = self._heartbeat.call(lambda: Heartbeat.last_beat(self._job.store, LEADER))
                if silence.of([leader]):
                    raise RuntimeError(f"rank {LEADER} has ended or fallen silent")
                time.sleep(self._interval / 4)
        except RuntimeError as error:
            raise RuntimeError(
                f"Rank {self._job.rank} cannot rejoin its job: {error}. Restart all ranks, from a checkpoint."
            ) from error
        finally:
            self._close()
        return Agreement.from_json(text)

    def _read(self) -> str | None:
        key = _admission_key(self._job.rank, self._job.start)
        return self._job.store.get(key).decode() if self._job.store.check([key]) else None

    def _close(self) -> None:
        self._heartbeat.close()
        self._at_end.cancel()


class Applicants:
    """The applicants for the places of lost ranks, as the leader finds them.

    ``interval``: seconds between two beats of an applicant. ``call``: calls a function that calls the store.
    """

    def __init__(self, job: Job, interval: float, call: Callable[[Callable[[], Any]], Any]) -> None:
        self._job, self._interval, self._call = job, interval, call
        self._members: dict[int, int] = {}  # by rank, the last process that was admitted
        self._found: dict[int, int] = {}  # by rank, the one that was found last
        self._heard: dict[tuple[int, int], Beat] = {}  # the last beat of each applicant, by rank and process

    def living(self, absent: Collection[int]) -> dict[int, str]:
        """Returns the living applicants for ``absent`` ranks, by rank, each with its host and process id in words."""
        found = {}
        for rank in absent:
            start: int = self._call(lambda: self._job.store.add(f"starts/{rank}", 0))  # noqa: B023
            if start > self._members.get(rank, 1) and self._lives(rank, start):
                self._found[rank] = start
                beat = self._heard[rank, start]
                found[rank] = f"host {beat.host}, pid {beat.pid}"
        return found

    def admit(self, agreement: Agreement) -> None:
        """Writes the agreement for the ranks that have joined."""
        for rank in agreement.joined:
            start = self._members[rank] = self._found[rank]
            self._call(lambda: self._job.store.set(_admission_key(rank, start), agreement.to_json()))  # noqa: B023

    def _lives(self, rank: int, start: int) -> bool:
        """Returns whether an applicant has published a beat since the last call; waits for one at the first call."""
        store, before = dist.PrefixStore(_key_of(rank, start), self._job.store), self._heard.get((rank, start))
        now: Beat = self._call(lambda: Heartbeat.last_beat(store, rank))
        if before is None:
            before, deadline = now, time.monotonic() + LISTENED * self._interval
            while now.number <= before.number and time.monotonic() < deadline:
                time.sleep(self._interval / 4)
                now = self._call(lambda: Heartbeat.last_beat(store, rank))
        self._heard[rank, start] = now
        return now.number > before.number


def _key_of(rank: int, start: int) -> str:
    return f"applicants/{rank}/{start}"


def _admission_key(rank: int, start: int) -> str:
    return f"admissions/{rank}/{start}"
