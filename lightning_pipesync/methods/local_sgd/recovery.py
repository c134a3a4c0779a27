"""Going on without a lost rank: sections that all ranks that are left complete, or none (``on_lost_rank="continue"``).

[Note: what is undone]
Ranks communicate in sections: the end of a step in which an average starts or is applied, a flush, the agreement on
weights that were loaded. A rank that has all data of a section tells all others so, with one byte, and ends the section
when all have told it. If that fails, the ranks that are left agree on the last section that all of them have completed
(:class:`Membership`), undo a further one, and make new groups, in a section of its own. What was undone, or not
completed, is repeated from each rank's own weights before it: the outcome is a round of the ranks that are left.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipesync.core.buckets import shard_slice
from lightning_pipesync.core.failure import is_lost_peer
from lightning_pipesync.core.membership import LEADER, Agreement, Membership
from lightning_pipesync.core.torch_private import map_tensors, store_of
from lightning_pipesync.core.transport import Transport
from lightning_pipesync.methods.replicas.tensors import Agreed

#: The most seconds that each thread of a broken transport is waited for.
CLOSE_S = 1.0

T = TypeVar("T")


@dataclass(frozen=True)
class Snapshot:
    """What a section may change of a method.

    Attributes:
        rank: this rank when it was taken, to which its shards belong.
        world_size: the number of ranks then.
        units: of each optimizer.
        flags: of the method.
    """

    rank: int
    world_size: int
    units: list[dict[str, Any]]
    flags: dict[str, bool]


class Recoverable(Protocol):
    """A method that can undo a section.

    Attributes:
        transport: the way to the other ranks.
    """

    transport: Transport

    def snapshot(self) -> Snapshot:
        """Returns what a section may change; not a collective call."""

    def regroup(self, snapshot: Snapshot) -> None:
        """Continues from ``snapshot`` with the ranks of the present default process group; a collective call."""

    def undo_averages(self) -> None:
        """Restores what averages have replaced that is not part of a snapshot; not a collective call."""

    def metrics(self) -> dict[str, float]:
        """Returns, among others, the number of ``rounds``."""


class Recovery:
    """Runs the sections of a method, and makes new groups when ranks are lost; see [Note: what is undone].

    Args:
        method: the method, attached.
        timeout_s: seconds after which a rank that does not answer counts as lost.
    """

    def __init__(self, method: Recoverable, timeout_s: float) -> None:
        self._method, self._timeout_s = method, timeout_s
        rank, world_size = dist.get_rank(), dist.get_world_size()
        # The process groups go, their store stays. Its keys are not those of an earlier method of this process.
        assert dist.group.WORLD is not None
        store = store_of(dist.group.WORLD)
        number = (store.add("pipesync/memberships", 1) - 1) // world_size
        self._store = dist.PrefixStore(f"pipesync/membership/{number}", store)
        self._membership = Membership(self._store, rank, world_size, timeout_s)
        self._first_rank = rank
        self._completed = 0  # sections
        self._lost: dict[int, str] = {}  # since the last regrouping

    def run(self, section: Callable[[], T]) -> T:
        """Runs a section, again after each loss that has kept a rank from completing it.

        Raises:
            RuntimeError: rank 0 is lost; or the others went on without this rank.
        """
        if self._method.transport.world_size == 1:
            return section()
        while True:
            results: list[T] = []
            before = self._method.snapshot()
            if self._completes(lambda: results.append(section()), before):  # noqa: B023 - called at once
                return results[0]
            self._method.undo_averages()

    def close(self) -> None:
        """Tells the others that this rank has left."""
        self._membership.close()

    def _completes(self, section: Callable[[], object], before: Snapshot) -> bool:
        """Runs a section; returns whether it stands. After a loss there are new groups, and otherwise it is undone."""
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
        self._completed = agreement.completed
        snapshot = self._method.snapshot() if stands else before
        self._completes(lambda: self._regroup(snapshot), snapshot)
        return stands

    def _commit(self) -> None:
        """Tells all other ranks that this one has all data of the section, and waits until all have told it."""
        self._method.transport.exchange_flags(1).wait()

    def _agree(self, error: RuntimeError) -> Agreement:
        """Agrees on the ranks that go on.

        Raises:
            RuntimeError: ``error``, if rank 0 is lost; or the others went on without this rank.
        """
        self._method.transport.close(CLOSE_S)
        agreement = self._membership.agree(self._completed)
        if agreement is None:
            raise error
        self._lost |= agreement.lost
        return agreement

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
        self._method.regroup(snapshot)
        self._warn()

    def _warn(self) -> None:
        """Warns on rank 0 which ranks are lost, and who goes on."""
        lost = ", ".join(f"rank {rank} ({where})" for rank, where in self._lost.items())
        self._lost = {}
        if self._first_rank != LEADER:
            return
        ranks = self._membership.ranks
        goes_on = f"ranks {', '.join(map(str, ranks))} go on as ranks 0 to {len(ranks) - 1}"
        warnings.warn(
            f"{f'Lost {lost}' if lost else 'Lost a connection, and no rank'} after "
            f"{self._method.metrics()['rounds']:g} rounds: {goes_on if len(ranks) > 1 else 'rank 0 goes on alone'}.",
            stacklevel=2,
        )


def reshard(agreed: dict[int, Agreed], snapshot: Snapshot, transport: Transport) -> dict[int, Agreed]:
    """Returns what is agreed, with the outer optimizer's state of this rank's present shards; a collective call.

    A lost rank's part of that state is zero.

    Args:
        agreed: of each bucket, by index, with the state of this rank's shards in ``snapshot``.
        snapshot: knows which shards these were.
        transport: the way to the ranks that are left.
    """

    def resharded(numel: int, tensor: Tensor) -> Tensor:
        if not tensor.dim():  # a counter of steps, which is the same on all ranks
            return tensor
        flat = torch.zeros(numel, dtype=tensor.dtype)
        flat[shard_slice(numel, snapshot.rank, snapshot.world_size)] = tensor
        return transport.shard(transport.all_reduce(flat).wait()).clone()

    return {
        index: (values, map_tensors(partial(resharded, values.numel()), outer))
        for index, (values, outer) in sorted(agreed.items())
    }
