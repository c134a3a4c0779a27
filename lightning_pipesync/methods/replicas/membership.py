"""The replicas that train together now, and the line between them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from lightning_pipesync.core.comm.line import Line, give_up
from lightning_pipesync.core.comm.objects import Objects
from lightning_pipesync.core.faults.agreement import Agreement
from lightning_pipesync.core.faults.lighthouse import Member

if TYPE_CHECKING:
    from lightning_pipesync.methods.replicas.regrouping import RegroupedReplicaMethod
    from lightning_pipesync.methods.replicas.snapshot import Snapshot


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

    def __init__(self, method: RegroupedReplicaMethod, id: str, job: Objects, timeout: timedelta) -> None:
        self._method, self._id, self._job, self._timeout = method, id, job, timeout
        self.members: list[Member] = []
        self.announces = False
        self._line: Line | None = None  # None: it is broken, or there is none yet
        self._made_in = ""  # the generation in which the line was made

    @property
    def ids(self) -> list[str]:
        return ids_of(self.members)

    @property
    def is_connected(self) -> bool:
        return self._line is not None

    def go_on(self, agreement: Agreement, before: Snapshot | None = None) -> None:
        """Makes a line of those that continue, unless they have it, and restores the state ``before``, if any."""
        is_new = self._made_in != agreement.generation
        if is_new and not (agreement.connected and self.ids == ids_of(agreement.continuing)):
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
        """Tells all replicas that this one has all data of the section, and waits for the same from them."""
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
