"""States of whole parameters, of which each rank has slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_pipesync.core.buckets import shaped
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.torch_private import foreach_copy_

#: By the name of a parameter, the slice of it, flattened, that a rank has.
Slices = Mapping[str, slice]


def slices_in_shard(shard: slice, places: Mapping[str, slice]) -> dict[str, slice]:
    """Returns the slices of parameters, by name, that lie in a shard of the buffer that holds the parameters."""
    slices = {}
    for name, place in places.items():
        start, stop = max(place.start, shard.start), min(place.stop, shard.stop)
        if place.start == place.stop and shard.start == 0:  # an empty parameter is in the first shard
            slices[name] = slice(0, 0)
        elif start < stop:
            slices[name] = slice(start - place.start, stop - place.start)
    return slices


def gather_states(
    states: Mapping[str, Mapping[str, Any]], slices: Sequence[Slices], transport: Transport
) -> dict[str, dict[str, Any]]:
    """Returns the states of whole parameters, from the slices that each rank has; a collective call.

    Args:
        states: of this rank's slices, by parameter and kind: 1-D tensors with a value for each of the slice's, and
            others, which are the same on all ranks that have a slice of the parameter.
        slices: each rank's slices of the parameters.
    """
    if all(of_rank == slices[0] for of_rank in slices):  # each rank has all
        return {name: dict(state) for name, state in states.items()}
    result: dict[str, dict[str, Any]] = {}
    described = {name: _described(state, slices[transport.rank][name]) for name, state in states.items()}
    for of_rank in transport.gather_objects(described):
        for name, description in of_rank.items():
            result.setdefault(name, description)
    kinds = {entry for state in result.values() for entry in state.items() if isinstance(entry[1], torch.dtype)}
    for kind, dtype in sorted(kinds, key=str):  # in the same order on all ranks
        names = [name for name, state in result.items() if state.get(kind) is dtype]
        for name, values in _gather(names, states, kind, dtype, slices, transport).items():
            result[name][kind] = values
    for state in result.values():
        state.update({k: value.on(transport.device) for k, value in state.items() if isinstance(value, _Undivided)})
    return result


def whole_state(value: Any, parameter: Tensor) -> Any:
    """Returns a copy of a value of a parameter's state; in its shape and format if it is flat, with as many values."""
    if not isinstance(value, Tensor):
        return value
    copy = value.to(value.device if value.dim() == 0 else parameter.device, copy=True)
    return shaped(copy, parameter) if copy.dim() == 1 and copy.numel() == parameter.numel() else copy


def _gather(
    names: Sequence[str],
    states: Mapping[str, Mapping[str, Any]],
    kind: str,
    dtype: torch.dtype,
    slices: Sequence[Slices],
    transport: Transport,
) -> dict[str, Tensor]:
    """Returns a value of the states of the parameters ``names``, on the CPU, from the ranks that have parts of it."""
    whole = {name: torch.empty(max(one[name].stop for one in slices if name in one), dtype=dtype) for name in names}
    parts = [[whole[name][of_rank[name]] for name in sorted(whole.keys() & of_rank.keys())] for of_rank in slices]
    own = parts.pop(transport.rank)
    foreach_copy_(own, [states[name][kind] for name in sorted(whole.keys() & states.keys())])
    others = [rank for rank in range(transport.world_size) if rank != transport.rank]
    received = {peer: torch.cat(views) for peer, views in zip(others, parts, strict=True) if views}
    handles = [transport.recv(buffer, peer) for peer, buffer in received.items()]
    handles += [transport.send(sent, peer) for sent in ([torch.cat(own)] if own else []) for peer in others]
    for handle in handles:
        handle.wait()
    for peer, views in zip(others, parts, strict=True):
        if views:
            foreach_copy_(views, list(received[peer].split([view.numel() for view in views])))
    return whole


def _described(state: Mapping[str, Any], place: slice) -> dict[str, Any]:
    """Returns the dtypes of tensors with a value for each of the slice's, and other values as they are."""
    described: dict[str, Any] = {}
    for kind, value in state.items():
        if not isinstance(value, Tensor):
            described[kind] = value
        elif value.shape == (place.stop - place.start,):
            described[kind] = value.dtype
        else:
            described[kind] = _Undivided(value.cpu(), value.is_cuda)
    return described


@dataclass(frozen=True)
class _Undivided:
    """A tensor of which each rank gets all, such as a number of steps; the device has another name there."""

    tensor: Tensor
    on_device: bool

    def on(self, device: torch.device) -> Tensor:
        return self.tensor.to(device) if self.on_device else self.tensor
