"""Ranks that are threads of this process, with real Gloo groups: for collectives, without processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from unittest.mock import patch

import torch.distributed as dist

from lightning_pipesync.core.comm.collectives import Collectives
from lightning_pipesync.core.comm.gloo import GlooExchange
from lightning_pipesync.core.comm.torus import Torus, TorusExchange
from lightning_pipesync.core.comm.traffic import Traffic
from lightning_pipesync.core.comm.tree import DoubleTree, TreeExchange
from lightning_pipesync.core.faults.failure import PeerWatch

T = TypeVar("T")

TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class ThreadRank:
    """A rank, whose number is that of a thread."""

    rank: int
    world_size: int
    store: dist.Store
    watch: PeerWatch

    def group(self, ranks: Sequence[int]) -> Any:
        """Returns a Gloo group of ``ranks``, which all call this."""
        store = dist.PrefixStore(str([*ranks]), self.store)
        return dist.ProcessGroupGloo(store, ranks.index(self.rank), len(ranks), TIMEOUT)

    def collectives(self, topology: str = "flat", columns: int | None = None) -> Collectives:
        """Returns collectives of all ranks, arranged as those of a transport; the caller closes them."""
        everyone = self.group(range(self.world_size))
        gloo = GlooExchange(everyone, self.watch)
        found = Collectives(self.rank, range(self.world_size), gloo, None, Traffic(), self.watch)
        if topology == "tree":
            found.topology = tree = DoubleTree(self.world_size)
            found._exchange = TreeExchange(tree, everyone, self.watch)
        elif topology == "torus2d":
            found.topology = torus = Torus(self.world_size, columns)
            row, column = (
                GlooExchange(self.group(ranks), self.watch)
                for ranks in (torus.row_of(self.rank), torus.column_of(self.rank))
            )
            found._exchange = TorusExchange(torus, self.rank, row, column)
        return found


def on_threads(function: Callable[..., T], world_size: int, *args: Any) -> list[T]:
    """Calls ``function(rank, *args)`` on a thread for each :class:`ThreadRank`; returns what each has returned."""
    store = dist.HashStore()
    with patch.object(dist, "get_rank", return_value=0):  # there is no default group
        watch = PeerWatch(TIMEOUT)
    ranks = [ThreadRank(rank, world_size, store, watch) for rank in range(world_size)]
    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(lambda rank: function(rank, *args), ranks))


def with_collectives(function: Callable[..., T], world_size: int, *args: Any, **arrangement: Any) -> list[T]:
    """Calls ``function(collectives, *args)`` on each rank's :meth:`ThreadRank.collectives`, and closes them."""

    def call(rank: ThreadRank) -> T:
        collectives = rank.collectives(**arrangement)
        try:
            return function(collectives, *args)
        finally:
            collectives.close()

    return on_threads(call, world_size)
