"""What a section may change of a method whose replicas come and go, and the outer state in it, shard by shard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_pipesync.core.buckets import shard_slice
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.torch_private import map_tensors
from lightning_pipesync.methods.replicas.method import Changes


@dataclass(frozen=True)
class Snapshot:
    """What a section may change of a method, see :class:`Sections`, on ``rank`` of ``world_size`` replicas."""

    rank: int
    world_size: int
    changes: Changes
    units: list[dict[str, Any]]

    def with_outer_states(self, change: Callable[[int, Any], Any]) -> Snapshot:
        """Returns a copy with ``change(numel, state)`` in place of the outer state of each bucket."""
        units = []
        for unit in self.units:
            replicas = unit["fragments"]["replicas"]
            if replicas.get("outer"):
                states = zip(replicas["common"], replicas["outer"]["states"], strict=True)
                outer = {"states": [change(flat.numel(), state) for flat, state in states]}
                unit = {**unit, "fragments": {**unit["fragments"], "replicas": {**replicas, "outer": outer}}}
            units.append(unit)
        return replace(self, units=units)


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
