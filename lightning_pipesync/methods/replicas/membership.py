"""The replicas that train together now, the line between them, and the state that is divided anew among others."""

from __future__ import annotations

import logging
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
from lightning_pipesync.core.torch_private import map_tensors
from lightning_pipesync.methods.replicas.method import Changes

if TYPE_CHECKING:
    from lightning_pipesync.methods.replicas.jobs import ElasticReplicaMethod

log = logging.getLogger(__name__)


class Membership:
    """Who trains together, as this rank knows it, and a line to the rank with the same shard of each of them.

    Attributes:
        members: of the last line on which all have met, in the order of their ids.
        announces: whether this rank is the one of its job that logs changes, once the job has joined.

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
            self.connect(agreement, snapshot)
            self._made_in = agreement.generation

    def missing(self, agreement: Agreement) -> list[Member]:
        """Returns the members that neither continue nor have left in order."""
        present = ids_of([*agreement.continuing, *agreement.gone])
        return [member for member in self.members if member.id not in present]

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

    def connect(self, agreement: Agreement, snapshot: Snapshot, takes_in: bool = False) -> None:
        """Makes a line of those that continue, and goes on from ``snapshot``.

        ``takes_in``: the line is of those that stay and those that are new, which go on from the snapshot of the first
        that stays.
        """
        members = agreement.members if takes_in else agreement.continuing
        first = agreement.staying[0] if takes_in else members[0]
        new, gone = (agreement.new, agreement.leaving) if takes_in else ([], agreement.gone)
        before, ids = self.members, ids_of(members)
        self.break_off()
        stores, key = self._stores(members), self._key(agreement, "new" if takes_in else "continuing")
        with self._on_all_ranks():
            line = self._line = Line(stores, ids.index(self._id), key, self._timeout)
        with self._on_all_ranks():
            self._method.transport.exchange_with(line)
        self._method.regroup(line, snapshot, ids.index(first.id), [ids.index(member.id) for member in new])
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
        what = ". ".join(happened) or "Lost a connection, and no replica"
        log.warning(f"{what} after {self._method.num_rounds} rounds: {number}.")


def ids_of(members: Sequence[Member]) -> list[str]:
    return [member.id for member in members]


def listed(members: Sequence[Member]) -> str:
    return ", ".join(member.described for member in members)


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
                {**bucket, "outer": change(bucket["global"].numel(), bucket["outer"])} if "outer" in bucket else bucket
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
