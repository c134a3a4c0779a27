"""``python -m benchmarks.collectives``: ``pipesync bench collectives``, beside parameter servers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from benchmarks import command
from benchmarks.baselines.servers import PushPull
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.lab.bench import collectives
from lightning_pipesync.lab.predictions.cluster import MeasuredCost


@dataclass(frozen=True, kw_only=True)
class Collectives(collectives.Collectives):
    """Times all-reduce and its two halves, compared with the backend's own, parameter servers and the limit."""

    def operations(self, flat: Tensor, transport: Transport) -> dict[collectives.Key, Callable[[], object]]:
        def push_and_pull(exchange: PushPull) -> None:
            exchange.push(flat)
            exchange.pull(flat)

        operations = super().operations(flat, transport)
        for operation, servers in servers_by_operation(transport.world_size).items():
            exchange = PushPull(transport, flat.numel(), servers)
            operations["ours", operation, "none"] = partial(push_and_pull, exchange)
        return operations

    def predict(self, link: MeasuredCost, operation: str, num_bytes: int, world_size: int) -> float:
        if operation in collectives.HALVES:
            return super().predict(link, operation, num_bytes, world_size)
        return link.sharded_servers(num_bytes, world_size, servers_by_operation(world_size)[operation])


def servers_by_operation(world_size: int) -> dict[str, int]:
    """Returns the numbers of parameter servers that are measured, by the name of the operation."""
    named = {"push + pull, central server": 1}
    if world_size > 3:
        named["push + pull, servers on half of the ranks"] = world_size // 2
    return {**named, "push + pull, servers on all ranks": world_size}


if __name__ == "__main__":
    sys.exit(command.main("benchmarks.collectives:Collectives"))
