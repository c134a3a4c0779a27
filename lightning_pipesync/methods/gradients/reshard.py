"""Resharding: brings the state of parameters to the ranks that have their new shards."""

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


def reshard(
    states: Mapping[str, Mapping[str, Any]], old: Sequence[Slices], new: Sequence[Slices], transport: Transport
) -> dict[str, dict[str, Any]]:
    """Moves the state of parameters from the ranks that have the ``old`` slices to those that have the ``new`` ones.

    A collective call. ``states`` are those of this rank's old slices, by parameter and kind: 1-D tensors with a value
    for each of the slice's, and others, which are the same on all ranks that have a slice of the parameter. ``old`` and
    ``new`` are the slices of each rank. Returns the states of this rank's new slices; that of an unchanged slice is not
    copied.
    """
    if list(old) == list(new):
        return {name: dict(state) for name, state in states.items()}
    rank = transport.rank
    merged: dict[str, dict[str, Any]] = {}
    described = {name: _described(state, old[rank][name]) for name, state in states.items()}
    for of_rank in transport.gather_objects(described):
        for name, description in of_rank.items():
            merged.setdefault(name, description)
    changed = [
        {name: place for name, place in slices.items() if name in merged and old[peer].get(name) != place}
        for peer, slices in enumerate(new)
    ]
    result = {name: dict(states[name]) for name in new[rank] if name in states and name not in changed[rank]}
    for name in changed[rank]:
        result[name] = {
            kind: value.on(transport.device) if isinstance(value, _Undivided) else value
            for kind, value in merged[name].items()
        }
    entries = [entry for state in merged.values() for entry in state.items()]
    kinds = {(kind, dtype) for kind, dtype in entries if isinstance(dtype, torch.dtype)}
    for kind, dtype in sorted(kinds, key=str):  # in the same order on all ranks
        having = {name for name, state in merged.items() if state.get(kind) is dtype}
        wanted = [{name: place for name, place in slices.items() if name in having} for slices in changed]
        values = {name: states[name][kind] for name in having & states.keys()}
        for name, received in _exchange(values, dtype, old, wanted, transport).items():
            result[name][kind] = received
    return result


def whole_state(value: Any, parameter: Tensor) -> Any:
    """Returns a copy of a value of a parameter's state; in its shape and format if it is flat, with as many values."""
    if not isinstance(value, Tensor):
        return value
    copy = value.to(value.device if value.dim() == 0 else parameter.device, copy=True)
    return shaped(copy, parameter) if copy.dim() == 1 and copy.numel() == parameter.numel() else copy


def _exchange(
    values: Mapping[str, Tensor],
    dtype: torch.dtype,
    old: Sequence[Slices],
    wanted: Sequence[Slices],
    transport: Transport,
) -> dict[str, Tensor]:
    """Returns, on the CPU, the values of the slices that this rank wants, from the ranks that have them."""
    rank = transport.rank
    result = {name: torch.empty(place.stop - place.start, dtype=dtype) for name, place in wanted[rank].items()}
    targets = {peer: _common(result, wanted[rank], old[peer]) for peer in range(transport.world_size)}
    sources = {peer: _common(values, old[rank], wanted[peer]) for peer in range(transport.world_size)}
    foreach_copy_(targets.pop(rank), sources.pop(rank))
    received = {peer: torch.empty(sum(map(torch.numel, t)), dtype=dtype) for peer, t in targets.items() if t}
    sent = {peer: torch.cat(tensors).cpu() for peer, tensors in sources.items() if tensors}
    handles = [transport.recv(buffer, peer) for peer, buffer in received.items()]
    handles += [transport.send(buffer, peer) for peer, buffer in sent.items()]
    for handle in handles:
        handle.wait()
    for peer, buffer in received.items():
        foreach_copy_(targets[peer], list(buffer.split([target.numel() for target in targets[peer]])))
    return result


def _common(values: Mapping[str, Tensor], slices: Slices, other: Slices) -> list[Tensor]:
    """Returns views of ``values``, which are of the ``slices``, where ``other`` has them, too, sorted by name."""
    common = []
    for name in sorted(slices.keys() & other.keys() & values.keys()):
        begin = slices[name].start
        start, stop = max(begin, other[name].start), min(slices[name].stop, other[name].stop)
        if start < stop:
            common.append(values[name][start - begin : stop - begin])
    return common


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
