"""Continuing without a lost rank, and with one that comes back (``on_lost_rank="continue"``).

[Note: what is undone]
Ranks communicate in sections: the end of a step in which an average starts or is applied, a flush, the agreement on
loaded weights. All remaining ranks complete a section, or none does. A rank that has all data of a section sends one
byte to all others, and ends the section when it has theirs. If that fails, the remaining ranks agree on the last
section that all of them have completed (:class:`Membership`), undo a further one, and make new groups, in another
section. Then they repeat what was undone from each rank's weights before it: the outcome is a round of the remaining
ranks.

[Note: who comes back]
After a flush rank 0 looks for processes that apply for a lost rank's place (:class:`Applicants`), and tells all others,
in a section. If there are some, all agree on them as on a loss, and in the new groups rank 0 sends them its state. All
ranks, the newcomers too, repeat that section until nobody applies.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist

from lightning_pipesync.core.faults.admission import Applicants, Application, Job
from lightning_pipesync.core.faults.errors import is_lost_peer
from lightning_pipesync.core.faults.heartbeat import interval_of
from lightning_pipesync.core.faults.membership import LEADER, Agreement, Membership
from lightning_pipesync.core.torch_private import store_of

if TYPE_CHECKING:
    from lightning_pipesync.methods.replicas.lost_ranks import ElasticReplicaMethod, Snapshot

#: Maximum seconds that each thread of a broken transport is waited for.
CLOSE_S = 1.0

T = TypeVar("T")


class Recovery:
    """Runs the sections of a method, and makes new groups when ranks are lost; see [Note: what is undone].

    Args:
        method: attached; in a process that comes back, in a group of this process alone.
        timeout_s: seconds after which a rank that does not answer counts as lost.
        job: None if no process can take the place of a lost rank.

    Raises:
        RuntimeError: this process cannot come back, as rank 0 is lost or has ended.
        ValueError: it has other settings, or another model, than rank 0.
    """

    def __init__(self, method: ElasticReplicaMethod, timeout_s: float, job: Job | None = None) -> None:
        self._method, self._timeout_s = method, timeout_s
        self._completed = 0  # sections
        self._lost: dict[int, str] = {}  # since the last regrouping
        self._newcomers: dict[int, str] = {}  # who do not know what the others do
        if job is None:
            self._first_rank, world_size = dist.get_rank(), dist.get_world_size()
            # The store outlives the process groups. Its keys are not those of an earlier method of this process.
            assert dist.group.WORLD is not None
            store = store_of(dist.group.WORLD)
            number = (store.add("pipesync/memberships", 1) - 1) // world_size
            self._store: dist.Store = dist.PrefixStore(f"pipesync/membership/{number}", store)
        else:
            self._first_rank, world_size, self._store = job.rank, job.world_size, job.store
        joins = Application(job, timeout_s).wait() if job is not None and job.is_replacement else None
        self._first_world_size = world_size
        self._membership = Membership(self._store, self._first_rank, world_size, timeout_s, joins)
        self._applicants: Applicants | None = None
        if job is not None:
            self._applicants = Applicants(job, interval_of(timeout_s), self._membership.call)
        if joins is not None:
            self._come_back(joins)

    def run(self, section: Callable[[], T]) -> T:
        """Runs a section, again after each loss that has kept a rank from completing it.

        Raises:
            RuntimeError: rank 0 is lost; or the others have continued without this rank.
        """
        if self._method.transport.world_size == 1:
            return section()
        while True:
            results: list[T] = []
            before = self._method.snapshot()
            if self._completes(lambda: results.append(section()), before):  # noqa: B023 - called at once
                return results[0]
            self._method.undo_averages()

    def admit(self) -> None:
        """Admits processes that apply for lost ranks' places; a collective call with the errors of :meth:`run`."""
        while self._applicants is not None and max(self.run(self._exchange_applicants)):
            self._membership.forget_pauses()  # all others have answered, or there are none
            agreement = self._agree(RuntimeError(f"Rank {LEADER} is lost, which leads the others."))
            self._regroup_as_agreed(agreement, self._method.snapshot())

    def close(self) -> None:
        """Tells the others that this rank has left."""
        self._membership.close()

    def _completes(self, section: Callable[[], object], before: Snapshot) -> bool:
        """Runs a section; returns whether all ranks have completed it. After a loss makes new groups, and undoes it."""
        has_all_data = False
        try:
            section()
            has_all_data = True
            self._completed += 1
            self._commit()
            self._membership.forget_pauses()
            return True
        except RuntimeError as error:
            if not is_lost_peer(error):
                raise
            agreement = self._agree(error)
        stands = has_all_data and agreement.completed == self._completed
        self._regroup_as_agreed(agreement, self._method.snapshot() if stands else before)
        return stands

    def _exchange_applicants(self) -> list[int]:
        """Returns by rank whether that rank, rank 0, knows of processes that apply."""
        if self._first_rank == LEADER and self._applicants is not None:
            absent = set(range(self._first_world_size)) - set(self._membership.ranks)
            self._newcomers = self._applicants.living(absent)
        return self._method.transport.exchange_flags(int(bool(self._newcomers))).wait()

    def _come_back(self, joins: Agreement) -> None:
        """Takes the place of a lost rank, as all others have agreed."""
        try:
            self._method.transport.close(CLOSE_S)
            self._regroup_as_agreed(joins, self._method.snapshot())
            self.admit()
        except BaseException:
            self._membership.close()
            raise

    def _commit(self) -> None:
        """Sends all ranks that this rank has all data of the section, and waits for the same from them."""
        self._method.transport.exchange_flags(1).wait()

    def _agree(self, error: RuntimeError) -> Agreement:
        """Agrees on the remaining ranks; raises ``error`` if rank 0 is lost."""
        self._method.transport.close(CLOSE_S)
        agreement = self._membership.agree(self._completed, self._newcomers)
        if agreement is None:
            raise error
        if self._first_rank == LEADER and self._applicants is not None:
            self._applicants.admit(agreement)
        return agreement

    def _regroup_as_agreed(self, agreement: Agreement, snapshot: Snapshot) -> None:
        """Makes new groups, and continues from ``snapshot`` in them; again, if another rank is lost meanwhile."""
        self._completed = agreement.completed
        self._lost |= agreement.lost
        self._newcomers = agreement.joined
        self._completes(lambda: self._regroup(snapshot), snapshot)
        self._newcomers = {}

    def _regroup(self, snapshot: Snapshot) -> None:
        """Makes the default process group, and all of the method's, of the members; a collective call."""
        if dist.is_initialized():
            dist.destroy_process_group()
        ranks = self._membership.ranks
        try:
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(f"groups/{self._membership.generation}", self._store),
                rank=ranks.index(self._first_rank),
                world_size=len(ranks),
                timeout=timedelta(seconds=self._timeout_s),
            )
        finally:
            self._membership.forget_pauses()  # no beat passes the store while it waits for a key
        self._method.regroup(snapshot, [ranks.index(rank) for rank in self._newcomers])
        self._warn()

    def _warn(self) -> None:
        lost, self._lost = self._lost, {}
        if self._first_rank != LEADER:
            return
        happened = [f"Lost {_listed(lost)}"] if lost else []
        happened += [f"Took in {_listed(self._newcomers)}"] if self._newcomers else []
        ranks = self._membership.ranks
        left = f"ranks {', '.join(map(str, ranks))} continue as ranks 0 to {len(ranks) - 1}"
        warnings.warn(
            f"{'. '.join(happened) or 'Lost a connection, and no rank'} after "
            f"{self._method.num_rounds} rounds: {left if len(ranks) > 1 else 'rank 0 continues alone'}.",
            stacklevel=2,
        )


def _listed(ranks: Mapping[int, str]) -> str:
    return ", ".join(f"rank {rank} ({where})" for rank, where in ranks.items())
