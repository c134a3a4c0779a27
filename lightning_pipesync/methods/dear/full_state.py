"""What an optimizer keeps for whole parameters, from the shards that the ranks have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_pipesync.core.transport import Transport
from lightning_pipesync.methods.dear.bucket import FusedBucket


def full_states(bucket: FusedBucket, transport: Transport) -> list[dict[str, Any]]:
    """Returns for each parameter of a bucket what the user's optimizer would keep for it; a collective call.

    Tensors with a value for each of the parameter's travel, one kind after the other; all else is the same on all ranks
    that have a part of the parameter.
    """
    own = bucket.update.piece_states()
    if not bucket.sharded:
        return [own.get(index, {}) for index in range(len(bucket.members))]
    described = {i: {name: _describe(value) for name, value in state.items()} for i, state in own.items()}
    merged: dict[int, dict[str, Any]] = {}
    for of_rank in transport.gather_objects(described):
        for index, state in of_rank.items():
            merged.setdefault(index, state)
    states: list[dict[str, Any]] = [dict(merged.get(index, {})) for index in range(len(bucket.members))]
    kinds = {name: value for state in states for name, value in state.items() if isinstance(value, torch.dtype)}
    for name, dtype in kinds.items():
        flat = torch.zeros(bucket.values.flat.numel(), dtype=dtype, device=bucket.values.flat.device)
        shard = transport.shard(flat)
        for index, place in bucket.places_in_shard():
            if name in own.get(index, {}):
                shard[place] = own[index][name]
        transport.all_gather(flat).wait()
        sizes = [member.tensor.numel() for member in bucket.members]
        for state, part, member in zip(states, flat.split(sizes), bucket.members, strict=True):
            if name in state:
                state[name] = part.view(member.tensor.shape).clone()
    return states


def _describe(value: Any) -> Any:
    """Returns the type of the values if there is one for each of the parameter's, else the value."""
    return value.dtype if isinstance(value, Tensor) and value.dim() else value
