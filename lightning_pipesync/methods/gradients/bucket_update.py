"""The optimizer's step on a bucket, or on this rank's shard of it.

[Note: one tensor]
On a CPU, a step on hundreds of small tensors takes six times as long as one on a tensor with all of their values. An
element-wise optimizer makes the same update either way, bit for bit in fp32 and fp64. So it steps on the whole buffer
while all gradients are there and all parameters have had as many steps, and on each parameter otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipesync.core.buckets import flattened, shaped
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.guarded_states import at_hand
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.core.torch_private import foreach_copy_, twin_optimizer


@dataclass(frozen=True)
class Piece:
    """A parameter, or the part of it that this rank updates.

    ``index`` is that of the parameter in its bucket. ``place`` is the slice of the parameter, flattened in its order in
    memory, to which ``values`` and ``gradient`` belong; None: they are the whole parameter's, in its shape.
    """

    index: int
    name: str
    parameter: Tensor
    values: Tensor
    gradient: Tensor
    place: slice | None

    @classmethod
    def in_shard(
        cls, index: int, name: str, parameter: Tensor, values: Tensor, gradient: Tensor, place: slice
    ) -> Piece:
        """Returns the part of a parameter in this rank's shard: ``values`` and ``gradient`` are 1-D."""
        if parameter.dim() == 0:  # it is in one shard as a whole, and so is its state, of which each value is 0-dim
            return cls(index, name, parameter, values.view(()), gradient.view(()), None)
        return cls(index, name, parameter, values, gradient, place)

    def cut(self, state: Any) -> Any:
        """Returns a copy of a value of the optimizer's state of the parameter, cut to this part and in its format."""
        if not isinstance(state, Tensor):
            return state
        if state.dim() == 0 or state.shape != self.parameter.shape:  # a number of steps, or statistics of rows
            return state.clone()
        flat = flattened(state, self.parameter)
        return shaped(flat.clone(), self.parameter) if self.place is None else flat[self.place].clone()


class BucketUpdate:
    """Steps a copy of the user's optimizer on pieces of parameters.

    The copy has the class and the attributes of the user's optimizer, and the hyper-parameters that it had when the
    step was taken. The user's optimizer never steps; a scheduler may change it while the step is still in flight.
    ``group`` is the index of the parameter group of all pieces. If the optimizer is element-wise, ``values`` and
    ``gradient`` are 1-D buffers that hold those of all pieces.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        group: int,
        pieces: Sequence[Piece],
        values: Tensor | None = None,
        gradient: Tensor | None = None,
    ) -> None:
        self._optimizer, self._group, self._pieces = optimizer, group, pieces
        self._values, self._gradient = values, gradient
        self._is_whole = False  # whether the copy steps on the whole buffer
        self._copy = twin_optimizer(optimizer, [dict(optimizer.param_groups[group])], {})
        self.read_states()

    def copy_hyperparameters(self) -> None:
        """Copies the current hyper-parameters of the user's optimizer, on which the next step depends."""
        self.set_hyperparameters(self._optimizer.param_groups[self._group])

    def set_hyperparameters(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if name != "params":
                self._copy.param_groups[0][name] = value.clone() if isinstance(value, Tensor) else value

    def read_states(self) -> None:
        with at_hand(self._optimizer) as states:
            self._set_states(
                {
                    piece.values: {name: piece.cut(value) for name, value in states[piece.parameter].items()}
                    for piece in self._pieces
                    if piece.parameter in states
                }
            )

    def states(self) -> dict[str, dict[str, Any]]:
        """Returns the optimizer state of each piece, by the parameter's name.

        A tensor with a value for each of a piece's is 1-D, in the order of the piece in memory.
        """
        states = self._states()
        return {
            piece.name: {kind: _flat(value, piece) for kind, value in states[piece.values].items()}
            for piece in self._pieces
            if piece.values in states
        }

    def apply(self, present: Sequence[bool]) -> None:
        """Steps the copy on the pieces whose gradient is ``present``, by index of the parameter."""
        before = self._hyperparameters()
        if self._is_whole and all(present[piece.index] for piece in self._pieces):
            assert self._values is not None
            self._values.grad = self._gradient
        else:
            if self._is_whole:
                self._step_on_pieces(self._states())
            for piece in self._pieces:
                piece.values.grad = piece.gradient if present[piece.index] else None
        if self._pieces:
            self._copy.step()
        for name, value in self._hyperparameters().items():
            if value is not before.get(name) and value != before.get(name):
                raise RuntimeError(
                    f"{type(self._copy).__name__} changes {name!r} of its parameter groups in a step, as if it were a "
                    "hyper-parameter: copies of it step, one for each bucket, and cannot be kept together."
                )

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Context manager at whose end its steps are undone, to the last bit."""
        stepped = list(self._copy.param_groups[0]["params"])
        was_whole = self._is_whole
        values = [(tensor, tensor.clone()) for tensor in stepped]
        states = {
            tensor: {kind: value.clone() if isinstance(value, Tensor) else value for kind, value in state.items()}
            for tensor, state in self._copy.state.items()
        }
        try:
            yield
        finally:
            self._copy.param_groups[0]["params"], self._is_whole = stepped, was_whole
            self._copy.state.clear()
            self._copy.state.update(states)
            with torch.no_grad():
                for tensor, value in values:
                    tensor.copy_(value)

    def _hyperparameters(self) -> dict[str, Any]:
        return {name: value for name, value in self._copy.param_groups[0].items() if name != "params"}

    def _set_states(self, states: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Sets the state of each piece, and steps on the whole buffer if that is possible, see [Note: one tensor]."""
        whole = self._joined(states) if self._can_be_whole() else None
        if whole is None:
            self._step_on_pieces(states)
        else:
            assert self._values is not None
            self._copy.param_groups[0]["params"] = [self._values]
            self._copy.state.clear()
            self._copy.state.update({self._values: whole} if whole else {})
            self._is_whole = True

    def _step_on_pieces(self, states: Mapping[Tensor, Mapping[str, Any]]) -> None:
        self._copy.param_groups[0]["params"] = [piece.values for piece in self._pieces]
        self._copy.state.clear()
        self._copy.state.update({values: dict(state) for values, state in states.items()})
        self._is_whole = False

    def _can_be_whole(self) -> bool:
        """Returns whether a step on the buffer is bit for bit one on the pieces.

        A 0-dim parameter's state cannot be told from a number of steps. Torch's fused steps, and those in half
        precision, round the last values of a tensor in another way.
        """
        return (
            self._values is not None
            and self._values.dtype in (torch.float32, torch.float64)
            and not self._copy.param_groups[0].get("fused")
            and all(piece.parameter.dim() for piece in self._pieces)
        )

    def _joined(self, states: Mapping[Tensor, Mapping[str, Any]]) -> dict[str, Any] | None:
        """Returns the state of the buffer; None if those of the pieces do not belong together."""
        assert self._values is not None
        given = [states[piece.values] for piece in self._pieces if piece.values in states]
        if not given:
            return {}
        if len(given) < len(self._pieces) or any(state.keys() != given[0].keys() for state in given):
            return None
        joined: dict[str, Any] = {}
        for kind, first in given[0].items():
            values = [state[kind] for state in given]
            if isinstance(first, Tensor) and first.dim():
                if not all(isinstance(value, Tensor) and value.dtype == first.dtype for value in values):
                    return None
                joined[kind] = torch.zeros_like(self._values, dtype=first.dtype)
                for piece, value in zip(self._pieces, values, strict=True):
                    self._part(joined[kind], piece).copy_(flattened(value, piece.values))
            elif all(type(value) is type(first) and bool(value == first) for value in values):
                joined[kind] = first
            else:
                return None
        return joined

    def _states(self) -> dict[Tensor, dict[str, Any]]:
        """Returns the state of each piece that has one; those of the buffer as views."""
        if not self._is_whole:
            return {values: dict(state) for values, state in self._copy.state.items()}
        assert self._values is not None
        if not (whole := self._copy.state.get(self._values)):
            return {}
        return {
            piece.values: {kind: self._of_piece(value, piece) for kind, value in whole.items()}
            for piece in self._pieces
        }

    def _of_piece(self, value: Any, piece: Piece) -> Any:
        if not isinstance(value, Tensor):
            return value
        return shaped(self._part(value, piece), piece.values) if value.dim() else value.clone()

    def _part(self, whole: Tensor, piece: Piece) -> Tensor:
        """Returns the values of a piece, 1-D, of a tensor like the buffer: a view."""
        assert self._values is not None
        start = piece.values.storage_offset() - self._values.storage_offset()
        return whole[start : start + piece.values.numel()]


def _flat(value: Any, piece: Piece) -> Any:
    is_of_values = isinstance(value, Tensor) and value.dim() > 0 and value.shape == piece.values.shape
    return flattened(value, piece.values) if is_of_values else value


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
        with transport.traffic.beside_steps():
            gathered = _gather(names, states, kind, dtype, slices, transport)
        for name, values in gathered.items():
            result[name][kind] = values
    for state in result.values():
        state.update({k: value.on(transport.device) for k, value in state.items() if isinstance(value, _Undivided)})
    return result


def whole_states(
    states: Mapping[str, Mapping[str, Any]], members: Iterable[NamedParameter]
) -> dict[Tensor, dict[str, Any]]:
    """Returns copies of states of whole parameters, by name, as an optimizer has them, of those of ``members``."""
    return {
        member.tensor: {kind: _whole(value, member.tensor) for kind, value in states[member.name].items()}
        for member in members
        if member.name in states
    }


def _whole(value: Any, parameter: Tensor) -> Any:
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
    if own:
        sent = torch.cat(own)
        handles += [transport.send(sent, peer) for peer in others]
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
