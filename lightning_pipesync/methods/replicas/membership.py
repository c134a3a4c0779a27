"""The replicas that train together now, the line between them, and the state that is divided anew among others."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipesync.core.buckets import shard_slice
from lightning_pipesync.core.comm.line import Line, give_up
from lightning_pipesync.core.comm.objects import Objects
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.faults.agreement import Agreement
from lightning_pipesync.core.faults.lighthouse import Member
from lightning_pipesync.core.faults.notice import Notice
from lightning_pipesync.core.torch_private import map_tensors
from lightning_pipesync.methods.replicas.method import Changes

if TYPE_CHECKING:
    from lightning_pipesync.methods.replicas.jobs import ElasticReplicaMethod

#: What all ranks of a job agree on at each step; of several wishes the last one counts.
STAYS, AFTER_ROUND, NOW = range(3)

#: Seconds of a step, at least, when it is foretold how many there will be.
SHORTEST_STEP_S = 1e-3

#: Steps after which an optimizer that has taken part in none of them counts as one that pauses.
PAUSES = 10


class Membership:
    """Who trains together, as this rank knows it, and a line to the rank with the same shard of each of them.

    Attributes:
        members: of the last line on which all have met, in the order of their ids.
        announces: whether this rank is the one of its job that warns of changes, once the job has joined.

    Args:
        method: attached; its transport exchanges along the line.
        id: of this replica among all others.
        job: this job's ranks.
        timeout: after which a replica that does not answer counts as lost.
    """

    def __init__(self, method: ElasticReplicaMethod, id: str, job: Objects, timeout: timedelta) -> None:
        self._method, self._id, self._job, self._timeout = method, id, job, timeout
        self.members: list[Member] = []
        self.announces = False
        self._line: Line | None = None  # None: it is broken, or there is none yet
        self._made_in = ""  # the generation in which the line was made

    @property
    def is_connected(self) -> bool:
        return self._line is not None

    def go_on(self, agreement: Agreement, before: Snapshot | None = None) -> None:
        """Makes a line of those that continue, unless they have it, and restores the state ``before``, if any."""
        is_new = self._made_in != agreement.generation
        if is_new and not (agreement.connected and ids_of(self.members) == ids_of(agreement.continuing)):
            snapshot = self._method.snapshot() if before is None else self._method.completed(before)
            self._connect(agreement, "continuing", snapshot, agreement.continuing, gone=agreement.gone)
            self._made_in = agreement.generation

    def missing(self, agreement: Agreement) -> list[Member]:
        """Returns the members that neither continue nor have left in order."""
        present = ids_of([*agreement.continuing, *agreement.gone])
        return [member for member in self.members if member.id not in present]

    def take_in(self, agreement: Agreement, snapshot: Snapshot) -> None:
        """Makes a line of those that stay and those that are new, and hands over to these what the former know."""
        first, new = agreement.staying[0], agreement.new
        self._connect(agreement, "new", snapshot, agreement.members, first, new, agreement.leaving)

    def commit(self) -> None:
        """Tells all replicas that this one has all data of the round, and waits for the same from them."""
        self._method.transport.exchange_flags(1).wait()

    def disconnect(self) -> None:
        """Ends what is left of the line."""
        if self._line is not None:
            self._line.close()
            self._line = None

    def break_off(self) -> None:
        """Ends what is left of the line, and the waits of this job's ranks for each other."""
        self.disconnect()
        self._method.transport.end_waits_for_shards()

    def give_up(self, agreement: Agreement) -> None:
        """Tells those that wait for this replica, to take new ones in, that it does not come."""
        if agreement.changes and agreement.members:
            give_up(self._stores(agreement.members), self._key(agreement, "new"))

    def decline(self, agreement: Agreement) -> None:
        """Tells the others of a quorum that this replica asks again."""
        give_up(self._stores(agreement.continuing), self._key(agreement, "continuing"))
        self.give_up(agreement)

    def _connect(
        self,
        agreement: Agreement,
        of: str,
        snapshot: Snapshot,
        members: list[Member],
        first: Member | None = None,
        new: Sequence[Member] = (),
        gone: Sequence[Member] = (),
    ) -> None:
        """Makes a line, and continues from ``snapshot``, those that are ``new`` from that of ``first``.

        Those that are ``gone`` have left in order.
        """
        before, ids = self.members, ids_of(members)
        self.break_off()
        stores, rank, key = self._stores(members), ids.index(self._id), self._key(agreement, of)
        with self._on_all_ranks():
            line = self._line = Line(stores, rank, key, self._timeout)
        with self._on_all_ranks():
            self._method.transport.exchange_with(line)
        first_rank, new_ranks = ids.index((first or members[0]).id), [ids.index(member.id) for member in new]
        self._method.regroup(line, snapshot, first_rank, new_ranks)
        self.members = members
        self.commit()
        if self.announces and ids[0] == self._id:
            self._announce(before, gone)

    @contextmanager
    def _on_all_ranks(self) -> Iterator[None]:
        """Context in which all ranks of the job make a connection: if one has failed, the others fail, too.

        Otherwise they would wait for it in what comes next.
        """
        failed: RuntimeError | None = None
        try:
            yield
        except RuntimeError as error:
            failed = error
        if not all(self._job.gather_objects(failed is None)):
            raise failed or dist.DistStoreError("another rank of this job has not been connected")

    def _stores(self, members: Sequence[Member]) -> list[str]:
        return [member.stores[self._job.rank] for member in members]

    def _key(self, agreement: Agreement, of: str) -> str:
        """Returns the key of the line with those that are new, or without them, of this rank's shard."""
        return f"{agreement.generation}/{of}/{self._job.rank}"

    def _announce(self, before: Sequence[Member], gone: Sequence[Member]) -> None:
        lost = [member for member in before if member.id not in ids_of([*self.members, *gone])]
        new = [member for member in self.members if member.id not in ids_of(before)]
        happened = [f"Lost {listed(lost)}"] if lost else []
        happened += [f"Said goodbye to {listed(gone)}"] if gone else []
        happened += [f"Took in {listed(new)}"] if new else []
        several = len(self.members) > 1
        number = f"{len(self.members)} replicas continue" if several else "this replica continues alone"
        warnings.warn(
            f"{'. '.join(happened) or 'Lost a connection, and no replica'} after "
            f"{self._method.num_rounds} rounds: {number}.",
            stacklevel=2,
        )


def ids_of(members: Sequence[Member]) -> list[str]:
    return [member.id for member in members]


def listed(members: Sequence[Member]) -> str:
    return ", ".join(member.described for member in members)


class Departure:
    """Decides at which step a replica leaves, on all ranks of its job, of which any may have been asked.

    One that leaves after a round loses nothing, so it trains on until then, if there is time.

    Args:
        greatest: returns the greatest of the numbers of all ranks of the job, each of which gives it one.

    Attributes:
        notice: by which this rank is asked.
        is_now: whether the replica leaves at the end of this step, and the next round would come too late.
    """

    def __init__(self, greatest: Callable[[int], int]) -> None:
        self.notice, self.is_now = Notice(), False
        self._greatest = greatest
        self._agreed = STAYS
        self._began = time.monotonic()  # the present step

    @property
    def deadline(self) -> float | None:
        """The time, of ``time.monotonic``, by which it leaves, with a round if one has begun; None: it stays."""
        return self.notice.deadline if self._agreed else None

    def begin_step(self, starts_in: Callable[[int], bool]) -> None:
        """Agrees with the other ranks of the job at a step; ``starts_in(n)``: a round may start at the nth's end."""
        now = time.monotonic()
        step_s, self._began = max(SHORTEST_STEP_S, now - self._began), now
        wish = STAYS
        if self.notice.deadline is not None:
            in_time = 1 + int(max(0.0, self.notice.deadline - now) / step_s)  # at least the one that may be due now
            wish = AFTER_ROUND if any(starts_in(steps) for steps in range(1, 1 + in_time)) else NOW
        self._agreed = self._greatest(wish)
        self.is_now = self._agreed == NOW
        if self._agreed:
            self.notice.give()


class TrainingSteps:
    """Counts the steps of a training: one begins with each optimizer that has taken part in the present one already.

    Args:
        optimizers: their number.
    """

    def __init__(self, optimizers: int) -> None:
        self._number, self._latest = 0, [0] * optimizers  # the present step, and the last one of each optimizer

    def take_part(self, index: int) -> bool:
        """Notes that an optimizer is about to step; returns whether a step of the training begins with it."""
        begins = self._latest[index] == self._number
        self._number += begins
        self._latest[index] = self._number
        return begins

    @property
    def first(self) -> int:
        """The first optimizer that does not pause."""
        return min(self._active)

    @property
    def last(self) -> int:
        """The last optimizer that does not pause."""
        return max(self._active)

    @property
    def _active(self) -> list[int]:
        return [index for index, latest in enumerate(self._latest) if self._number - latest < PAUSES]


@dataclass(frozen=True)
class Snapshot:
    """What a round may change of a method, see :class:`QuorumRounds`, on ``rank`` of ``world_size`` replicas."""

    rank: int
    world_size: int
    changes: Changes
    replicas: list[dict[str, Any]]

    def with_outer_states(self, change: Callable[[int, Any], Any]) -> Snapshot:
        """Returns a copy with ``change(numel, state)`` in place of the outer state of each bucket."""
        replicas = []
        for replica in self.replicas:
            buckets = [
                {**bucket, "outer": change(bucket["common"].numel(), bucket["outer"])} if "outer" in bucket else bucket
                for bucket in replica["weights"]["buckets"]
            ]
            replicas.append({**replica, "weights": {**replica["weights"], "buckets": buckets}})
        return replace(self, replicas=replicas)


def resharded(rank: int, world_size: int, transport: Transport, numel: int, outer: Any) -> Any:
    """Returns the outer state of this rank's present shard of a bucket of ``numel`` values; a collective call.

    ``outer`` is that of the shard of ``rank`` among ``world_size`` ranks. A lost rank's part of the state is zero.
    """

    whole = whole_state(rank, world_size, transport, numel, outer)
    return map_tensors(lambda tensor: transport.shard(tensor).clone() if tensor.dim() else tensor, whole)


def whole_state(rank: int, world_size: int, transport: Transport, numel: int, outer: Any) -> Any:
    """Returns the outer state of a whole bucket; arguments as of :func:`resharded`."""

    def whole(tensor: Tensor) -> Tensor:
        if not tensor.dim():  # a counter of steps, which is the same on all ranks
            return tensor
        flat = torch.zeros(numel, dtype=tensor.dtype)
        flat[shard_slice(numel, rank, world_size)] = tensor
        return transport.all_reduce(flat).wait()

    return map_tensors(whole, outer)


def zeroed(numel: int, outer: Any) -> Any:
    """Returns an outer state of zeros: the others contribute theirs when the state is resharded."""
    return map_tensors(lambda tensor: torch.zeros_like(tensor) if tensor.dim() else tensor, outer)
