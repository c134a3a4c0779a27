"""Groups of neighboring ranks that train one replica, synchronized in each step, and are averaged with other groups.

That is local SGD between hosts or racks, and synchronous training within, as HSDP with DiLoCo. The ranks stand in rows,
one for each group. Between groups each rank averages its part of the replica with the ranks of its column, which have
the same part: each link between groups carries 1 / ranks of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_pipesync.core.codecs import Codec
from lightning_pipesync.core.comm.collectives import Collectives
from lightning_pipesync.core.comm.handle import Handle
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.feedback import ErrorFeedback


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
