"""Reduce-scatter and all-gather on a 2-D torus: along rows, then along columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from lightning_pipesync.core.buckets import shard_slice
from lightning_pipesync.core.codecs import Codec, get_codec
from lightning_pipesync.core.comm.gloo import GlooExchange, ShardHook
from lightning_pipesync.core.comm.nccl import NcclExchange
from lightning_pipesync.core.comm.topology import Sent, Topology
from lightning_pipesync.core.feedback import ErrorFeedback

#: Rows send values as they are: only what crosses the rows is encoded, once.
NONE = get_codec("none")


class Torus(Topology):
    """The grid of ranks, row by row: ranks 0, 1, ... are the first row.

    Args:
        world_size: number of ranks.
        columns: ranks in a row, as many as a host has accelerators or a rack hosts; None: as square as possible.

    Raises:
        ValueError: the number of ranks is not a multiple of ``columns``, or has no divisor.
    """

    gathers_parts = False

    def __init__(self, world_size: int, columns: int | None) -> None:
        super().__init__(world_size)
        divisors = [size for size in range(2, world_size) if world_size % size == 0]
        if columns is None and divisors:
            columns = min(divisors, key=lambda size: (abs(math.log(size * size / world_size)), -size))
        if columns not in divisors:
            possible = f"rows of {', '.join(map(str, divisors))} are possible" if divisors else "use topology='flat'"
            asked = "" if columns is None else f" with rows of torus_columns={columns}"
            raise ValueError(
                f"topology='torus2d'{asked} cannot divide {world_size} ranks into rows and columns: {possible}."
            )
        self.columns, self.rows = columns, world_size // columns

    def __str__(self) -> str:
        return f"torus2d with rows of {self.columns} ranks"

    @classmethod
    def of(cls, world_size: int) -> Torus | None:
        """Returns the torus of ``world_size`` ranks, as square as possible; None: they have no divisor."""
        try:
            return cls(world_size, columns=None)
        except ValueError:
            return None

    @classmethod
    def of_hosts(cls, hosts: Sequence[str]) -> Torus | None:
        """Returns the torus with a row for each host, from the names of the ranks' hosts.

        None: there is one host, or they do not all have the same number of neighboring ranks, two or more.
        """
        columns = hosts.count(hosts[0])
        rows = [set(hosts[first : first + columns]) for first in range(0, len(hosts), columns)]
        regular = len(set(hosts)) == len(rows) and len(rows) * columns == len(hosts)
        if columns == 1 or len(rows) == 1 or not regular or any(len(row) > 1 for row in rows):
            return None
        return cls(len(hosts), columns)

    def row_of(self, rank: int) -> list[int]:
        first = rank - rank % self.columns
        return list(range(first, first + self.columns))

    def column_of(self, rank: int) -> list[int]:
        return list(range(rank % self.columns, self.rows * self.columns, self.columns))

    def row_slice(self, numel: int, rank: int) -> slice:
        """Returns the slice of ``numel`` values that ``rank`` sums for its row."""
        return shard_slice(numel, rank % self.columns, self.columns)

    def shard_slice(self, numel: int, rank: int) -> slice:
        """Returns the slice of ``numel`` values that ``rank`` owns: a part of its :meth:`row_slice`."""
        outer = self.row_slice(numel, rank)
        inner = shard_slice(outer.stop - outer.start, rank // self.columns, self.rows)
        return slice(outer.start + inner.start, outer.start + inner.stop)

    def sent_to_reduce(self, numel: int, rank: int, wires: bool = False) -> list[Sent]:
        row, column = divmod(rank, self.columns)
        in_row = [(size, False) for size, _ in Topology(self.columns).sent_to_reduce(numel, column)]
        return in_row + Topology(self.rows).sent_to_reduce(self._numel_of_row(numel, rank), row, wires)

    def sent_to_gather(self, numel: int, rank: int, wires: bool = False) -> list[Sent]:
        row, size = rank // self.columns, self._numel_of_row(numel, rank)
        return Topology(self.rows).sent_to_gather(size, row, wires) + [(size, False)] * (self.columns - 1)

    def _numel_of_row(self, numel: int, rank: int) -> int:
        row = self.row_slice(numel, rank)
        return row.stop - row.start


class TorusExchange:
    """:class:`GlooExchange` on a 2-D torus: reduce-scatter along rows, all-reduce along columns, all-gather along rows.

    The all-reduce along columns has two halves, too, so that each rank owns a shard of the sum in between. Only
    1 / columns of a buffer travels between rows, and a ring has columns + rows - 2 steps instead of the number of ranks
    less 1. A codec encodes what travels along columns: sums of rows, whose residuals a rank has for its
    :meth:`Torus.row_slice`. An operation runs along its first direction in the background; the second direction starts
    when the operation is waited for: wait in the order of the calls, on all ranks.
    """

    def __init__(
        self, torus: Torus, rank: int, row: GlooExchange | NcclExchange, column: GlooExchange | NcclExchange
    ) -> None:
        self._torus, self._rank, self._row, self._column = torus, rank, row, column

    def reduce_scatter(
        self, flat: Tensor, codec: Codec, mean: bool, feedback: ErrorFeedback | None
    ) -> Callable[[], Tensor]:
        summed_in_row = self._row.reduce_scatter(flat, NONE, mean, None)
        residuals = self._of_row_slice(feedback, flat)
        return lambda: self._column.reduce_scatter(summed_in_row(), codec, mean, residuals)()

    def all_gather(
        self, flat: Tensor, codec: Codec, feedback: ErrorFeedback | None, part: slice | None = None
    ) -> Callable[[], Tensor]:
        assert part is None  # the ranks' rows and columns differ
        own, residuals = flat[self._row_slice(flat)], self._of_row_slice(feedback, flat)
        gathered_in_column = self._column.all_gather(own, codec, residuals)

        def gather_in_row() -> Tensor:
            gathered_in_column()
            return self._row.all_gather(flat, NONE, None)()

        return gather_in_row

    def all_reduce(
        self,
        flat: Tensor,
        codec: Codec,
        mean: bool,
        feedback: ErrorFeedback | None,
        shard_hook: ShardHook | None = None,
    ) -> Callable[[], Tensor]:
        summed_in_row = self._row.reduce_scatter(flat, NONE, mean, None)
        residuals = self._of_row_slice(feedback, flat)

        def reduce_in_column() -> Tensor:
            self._column.all_reduce(summed_in_row(), codec, mean, residuals, shard_hook)()
            return self._row.all_gather(flat, NONE, None)()

        return reduce_in_column

    def release_memory(self) -> None:
        self._row.release_memory()
        self._column.release_memory()

    def _row_slice(self, flat: Tensor) -> slice:
        return self._torus.row_slice(flat.numel(), self._rank)

    def _of_row_slice(self, feedback: ErrorFeedback | None, flat: Tensor) -> ErrorFeedback | None:
        return None if feedback is None else feedback.of_slice(self._row_slice(flat), self._torus.rows)
