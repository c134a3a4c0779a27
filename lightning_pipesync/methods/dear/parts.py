"""Which parts of the parameters a rank keeps something for, and how that gets to the ranks that need it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_pipesync.core.torch_private import foreach_copy_
from lightning_pipesync.core.transport import Transport

#: By the name of a parameter, a part of it, flattened.
Parts = Mapping[str, slice]


def parts_in(shard: slice, places: Mapping[str, slice]) -> dict[str, slice]:
    """Returns which parts of some parameters in a buffer lie in a shard of it.

    Args:
        shard: which of the buffer's values.
        places: which of them each parameter's are, by its name.
    """
    parts = {}
    for name, place in places.items():
        start, stop = max(place.start, shard.start), min(place.stop, shard.stop)
        if start < stop:
            parts[name] = slice(start - place.start, stop - place.start)
    return parts


def hand_over(
    kept: Mapping[str, Mapping[str, Any]], old: Sequence[Parts], new: Sequence[Parts], transport: Transport
) -> dict[str, dict[str, Any]]:
    """Brings what the ranks keep for their parts of some parameters to the ranks that shall have those parts.

    Parts that two ranks have are the same before and after. A collective call.

    Args:
        kept: for each of this rank's old parts, by the parameter's name, what is kept, by its kind: tensors with a
            value for each of the part's, and whatever else is the same on all ranks that have a part of it.
        old: for each rank, the parts that it has.
        new: for each rank, the parts that it shall have.
        transport: the way to the other ranks.

    Returns:
        The same as ``kept`` for this rank's new parts; those that it had before are handed on as they are.
    """
    if list(old) == list(new):
        return {name: dict(state) for name, state in kept.items()}
    rank = transport.rank
    merged: dict[str, dict[str, Any]] = {}
    for of_rank in transport.gather_objects({name: _described(state) for name, state in kept.items()}):
        for name, description in of_rank.items():
            merged.setdefault(name, description)
    changed = [
        {name: part for name, part in parts.items() if name in merged and old[peer].get(name) != part}
        for peer, parts in enumerate(new)
    ]
    states = {name: dict(kept[name]) for name in new[rank] if name in kept and name not in changed[rank]}
    for name in changed[rank]:
        states[name] = {kind: _placed(value, transport.device) for kind, value in merged[name].items()}
    kinds = {(kind, dtype) for state in merged.values() for kind, dtype in state.items() if _is_dtype(dtype)}
    for kind, dtype in sorted(kinds, key=str):  # in the same order on all ranks
        having = {name for name, state in merged.items() if state.get(kind) is dtype}
        wanted = [{name: part for name, part in parts.items() if name in having} for parts in changed]
        values = {name: kept[name][kind] for name in having & kept.keys()}
        for name, arrived in _move(values, dtype, old, wanted, transport).items():
            states[name][kind] = arrived
    return states


def _move(
    kept: Mapping[str, Tensor], dtype: torch.dtype, old: Sequence[Parts], wanted: Sequence[Parts], transport: Transport
) -> dict[str, Tensor]:
    """Returns the values of the parts that this rank wants, from the ranks that have them; they are on the CPU."""
    rank = transport.rank
    result = {name: torch.empty(part.stop - part.start, dtype=dtype) for name, part in wanted[rank].items()}
    targets = {peer: _common(result, wanted[rank], old[peer]) for peer in range(transport.world_size)}
    sources = {peer: _common(kept, old[rank], wanted[peer]) for peer in range(transport.world_size)}
    foreach_copy_(targets.pop(rank), sources.pop(rank))
    arriving = {peer: torch.empty(_numel(tensors), dtype=dtype) for peer, tensors in targets.items() if tensors}
    leaving = {peer: torch.cat(tensors).cpu() for peer, tensors in sources.items() if tensors}
    handles = [transport.recv(buffer, peer) for peer, buffer in arriving.items()]
    handles += [transport.send(buffer, peer) for peer, buffer in leaving.items()]
    for handle in handles:
        handle.wait()
    for peer, buffer in arriving.items():
        foreach_copy_(targets[peer], list(buffer.split([target.numel() for target in targets[peer]])))
    return result


def _common(values: Mapping[str, Tensor], own: Parts, other: Parts) -> list[Tensor]:
    """Returns views of the values, of the parts ``own``, that the parts ``other`` have, too, in the order of names."""
    common = []
    for name in sorted(own.keys() & other.keys() & values.keys()):
        begin = own[name].start
        start, stop = max(begin, other[name].start), min(own[name].stop, other[name].stop)
        if start < stop:
            common.append(values[name].reshape(-1)[start - begin : stop - begin])
    return common


def _numel(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _is_dtype(value: Any) -> bool:
    return isinstance(value, torch.dtype)


def _described(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the type of what has a value for each of the part's, and all else as it is."""
    return {
        kind: (v.dtype if v.dim() else _Scalar(v.cpu(), v.is_cuda)) if isinstance(v, Tensor) else v
        for kind, v in state.items()
    }


@dataclass(frozen=True)
class _Scalar:
    """A 0-dim tensor on its way to another rank, whose device has another name."""

    tensor: Tensor
    on_device: bool


def _placed(value: Any, device: torch.device) -> Any:
    if not isinstance(value, _Scalar):
        return value
    return value.tensor.to(device) if value.on_device else value.tensor
