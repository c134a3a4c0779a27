"""The optimizer's step on a bucket, or on this rank's shard of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_pipesync.core.torch_private import twin_optimizer


@dataclass(frozen=True)
class Piece:
    """A parameter, or the part of it that this rank updates.

    Attributes:
        index: of the parameter in its bucket.
        name: of the parameter.
        parameter: the user's own.
        values: of this part.
        gradient: of this part.
        place: the slice of the flattened parameter; None: the whole parameter, in its shape.
    """

    index: int
    name: str
    parameter: Tensor
    values: Tensor
    gradient: Tensor
    place: slice | None

    def cut(self, state: Any) -> Any:
        """Returns a copy of a value of the optimizer's state of the parameter, cut to this part."""
        if not isinstance(state, Tensor):
            return state
        return state.clone() if self.place is None or state.dim() == 0 else state.reshape(-1)[self.place].clone()


class BucketUpdate:
    """Steps a copy of the user's optimizer on pieces of parameters.

    The copy has the class and the attributes of the user's optimizer, and the hyper-parameters that it had when the
    step was taken. The user's optimizer never steps; a scheduler may change it while the step is still in flight.

    Args:
        optimizer: the user's own.
        group: which of its parameter groups the pieces belong to.
        pieces: the parts to update.
    """

    def __init__(self, optimizer: Optimizer, group: int, pieces: Sequence[Piece]) -> None:
        self._optimizer, self._group, self._pieces = optimizer, group, pieces
        state = {
            piece.values: {name: piece.cut(value) for name, value in optimizer.state[piece.parameter].items()}
            for piece in pieces
            if piece.parameter in optimizer.state
        }
        groups = [{**optimizer.param_groups[group], "params": [piece.values for piece in pieces]}]
        self._copy = twin_optimizer(optimizer, groups, state)

    def copy_hyperparameters(self) -> None:
        """Copies the current hyper-parameters of the user's optimizer."""
        for name, value in self._optimizer.param_groups[self._group].items():
            if name != "params":
                self._copy.param_groups[0][name] = value.clone() if isinstance(value, Tensor) else value

    def states(self) -> dict[str, dict[str, Any]]:
        """Returns the optimizer state of each piece, by the parameter's name."""
        return {p.name: dict(self._copy.state[p.values]) for p in self._pieces if p.values in self._copy.state}

    def load_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Sets the optimizer state of the pieces to what :meth:`states` returned for the same pieces."""
        for piece in self._pieces:
            if piece.name in states:
                self._copy.state[piece.values] = {
                    kind: value.to(piece.values.device) if isinstance(value, Tensor) and value.dim() else value
                    for kind, value in states[piece.name].items()
                }

    def apply(self, present: Sequence[bool]) -> None:
        """Steps the copy on the pieces whose gradient is ``present``, by index of the parameter.

        Raises:
            RuntimeError: the optimizer keeps state in its parameter groups, where copies cannot share it.
        """
        before = self._hyperparameters()
        for piece in self._pieces:
            piece.values.grad = piece.gradient if present[piece.index] else None
        if self._pieces:
            self._copy.step()
        for name, value in self._hyperparameters().items():
            if value is not before.get(name) and value != before.get(name):
                raise RuntimeError(
                    f"{type(self._copy).__name__} changes {name!r} of its parameter groups in a step, as if it were a "
                    "hyper-parameter: DeAR steps copies of it, one for each bucket, and cannot keep them together."
                )

    def _hyperparameters(self) -> dict[str, Any]:
        return {name: value for name, value in self._copy.param_groups[0].items() if name != "params"}
