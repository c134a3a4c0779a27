"""The collectives among replicas, and which of the replicas average with each other in a round.

[Note: groups of ranks]
Neighboring ranks may train one replica, synchronized in each step: local SGD between hosts or racks, and synchronous
training within, as HSDP with DiLoCo. The ranks stand in rows, one for each group. Between groups each rank averages its
part of the replica with the ranks of its column, which have the same part: each link between groups carries 1 / ranks
of a group.

[Note: gossip]
With neighbors a round replaces the weights x_i of replica i by sum_j W_ij x_j. W is a doubly stochastic mixing matrix:
the average of all replicas stays what it is, and each of them comes nearer to it. Here all weights in a row of W that
are not zero are equal.

[Note: the order of D-PSGD]
A step of D-PSGD (Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS 2017,
Algorithm 1) is X_{k+1} = X_k W - gamma dF(X_k): the gradient is that of the weights before the average, and changes
the weights after it. That is ``period=1, overlap_steps=1`` with ``mixing_factor="progress"``: the average of x_k runs
while the gradient at x_k is computed. With ``overlap_steps=0`` a round ends a step, as in all local SGD:
X_{k+1} = (X_k - gamma dF(X_k)) W. The average of all replicas moves by the mean of their steps in either order.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_pipesync.core.codecs import Codec
from lightning_pipesync.core.comm.collectives import Collectives
from lightning_pipesync.core.comm.handle import Handle
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.feedback import ErrorFeedback
from lightning_pipesync.methods.replicas.settings import Neighbors


class ReplicaGroups:
    """The collectives among replicas, of which each group of ranks has one.

    ``row`` are the ranks of this rank's group, which have the same values; ``column`` those with the same place in
    their groups. ``rank`` and ``world_size`` count groups.
    """

    def __init__(self, row: Collectives, column: Collectives) -> None:
        self._row, self._column = row, column
        self.rank, self.world_size = column.rank, column.world_size

    def all_reduce(self, flat: Tensor, **settings: Any) -> Handle[Tensor]:
        """Sums ``flat`` over the groups; ``settings`` as of :meth:`Collectives.all_reduce`.

        Waiting for the handle all-gathers each rank's part of the sum in the group, without loss: wait in the order of
        the calls, on all ranks.
        """
        return self._gathered(flat, self._column.all_reduce(self._row.shard(flat), **settings))

    def average_with(self, flat: Tensor, peers: Sequence[int], **settings: Any) -> Handle[Tensor]:
        """Sets ``flat`` to its mean over this group and ``peers``; as :meth:`Collectives.average_with`."""
        return self._gathered(flat, self._column.average_with(self._row.shard(flat), peers, **settings))

    def average_at(self, flat: Tensor, **settings: Any) -> Handle[Tensor]:
        """Sets ``flat`` to its mean over the groups, by the first one; as :meth:`Collectives.average_at`."""
        return self._gathered(flat, self._column.average_at(self._row.shard(flat), **settings))

    def _gathered(self, flat: Tensor, part: Handle[Tensor]) -> Handle[Tensor]:
        """Returns a handle that waits for a rank's part of ``flat``, and for those of the other ranks of its group."""

        def wait() -> Tensor:
            part.wait()
            return self._row.all_gather(flat).wait()

        return Handle(wait)

    def shard(self, flat: Tensor) -> Tensor:
        """Returns this rank's slice of ``flat``, among all ranks: a view."""
        return self._column.shard(self._row.shard(flat))

    def feedback(self, flat: Tensor, gathered: bool = True) -> ErrorFeedback:
        """Returns new residuals for ``flat``; as :meth:`Collectives.feedback`."""
        return self._column.feedback(self._row.shard(flat), gathered)

    def encodes_sums(self, codec: Codec) -> bool:
        """As :meth:`Collectives.encodes_sums`."""
        return self._column.encodes_sums(codec)


def replicas_of(transport: Transport) -> Transport | ReplicaGroups:
    """Returns the collectives among replicas: each rank has one, or each row of ranks."""
    if transport.row is None or transport.column is None:
        return transport
    return ReplicaGroups(transport.row, transport.column)


def check_group_size(size: int, world_size: int) -> None:
    """Raises a ValueError unless ``size`` divides the ranks into two or more groups."""
    possible = [number for number in range(1, world_size) if world_size % number == 0]
    if size not in possible:
        raise ValueError(
            f"ranks_per_replica={size!r} does not divide {world_size} ranks into two or more groups: set one of "
            f"{', '.join(map(str, possible)) or '1'}."
        )


def average_among(
    replicas: Transport | ReplicaGroups, flat: Tensor, members: Sequence[int], background: bool = False
) -> Handle[Tensor]:
    """Sets ``flat`` to its mean over ``members``, this replica and its neighbors; a collective call."""
    peers = [member for member in members if member != replicas.rank]
    return replicas.average_with(flat, peers, background=background)


def neighborhood(neighbors: Neighbors, replica: int, number: int, round_: int) -> list[int]:
    """Returns whose weights a replica averages in a round, in order: its neighbors and itself.

    Random pairs are drawn anew in each round, the same on all ranks; of an odd number one replica is left alone.

    Args:
        replica: the replica, in ``range(number)``.
        number: the number of replicas.
        round_: the number of the round, from which pairs are drawn.
    """
    if neighbors == "all":
        return list(range(number))
    if neighbors == "ring":
        return sorted({(replica + step) % number for step in (-1, 0, 1)})
    order = random.Random(round_).sample(range(number), number)
    place = order.index(replica)
    return sorted(order[place // 2 * 2 :][:2])


def number_of_participants(participation: float, world_size: int) -> int:
    """Returns how many ranks' weights are averaged: ``participation``, C of FedAvg, times their number."""
    return 1 if world_size == 1 else int(participation * world_size + 1e-9)


def participants(number: int, world_size: int, round_: int) -> list[int]:
    """Returns the ``number`` of ranks that are averaged in a round, drawn anew in each, the same on all ranks."""
    return sorted(random.Random(round_).sample(range(world_size), number))
