"""How ranks are arranged for their collectives: who owns which values of a sum, and how many each rank sends."""

from __future__ import annotations

from lightning_pipesync.core.buckets import shard_slice

#: A number of values that a rank sends, and whether the codec encodes them.
Sent = tuple[int, bool]


class Topology:
    """The arrangement in which every one of ``world_size`` ranks exchanges with every other, or in a ring of all.

    Subclasses arrange them in other ways; ``str()`` names the arrangement.

    Attributes:
        num_shards: into how many shards of one size a buffer divides; they have owners, other ranks have none.
        gathers_parts: whether an all-gather can fill a part of each shard.
        sends_sums: whether what is reduced travels as partial sums, which are of the type of sums.
    """

    num_shards: int
    gathers_parts = True
    sends_sums = False

    def __init__(self, world_size: int) -> None:
        self.world_size = self.num_shards = world_size

    def __str__(self) -> str:
        return "flat"

    def shard_slice(self, numel: int, rank: int) -> slice:
        """Returns the slice of ``numel`` values that ``rank`` owns."""
        return shard_slice(numel, rank, self.world_size)

    def sent_to_reduce(self, numel: int, rank: int, wires: bool = False) -> list[Sent]:
        """Returns what ``rank`` sends in a reduce-scatter of ``numel`` values.

        ``wires``: whether all ranks get what each has encoded, of which they compute all of the sum.
        """
        if wires:
            return [(numel, True)] * (self.world_size - 1)
        others = (self.shard_slice(numel, other) for other in range(self.world_size) if other != rank)
        return [(other.stop - other.start, True) for other in others]

    def sent_to_gather(self, numel: int, rank: int, wires: bool = False) -> list[Sent]:
        """Returns what ``rank`` sends in an all-gather of ``numel`` values; ``wires``: if they were reduced so."""
        if wires:
            return []
        own = self.shard_slice(numel, rank)
        return [(own.stop - own.start, True)] * (self.world_size - 1)
