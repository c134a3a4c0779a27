"""The optimizer's step on a bucket, or on this rank's shard of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import ASGD, SGD, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from lightning_pipesync.compat import twin_optimizer

#: Optimizers that treat every value by itself: a shard can be updated without the rest.
ELEMENTWISE: tuple[type[Optimizer], ...] = (SGD, Adam, AdamW, RMSprop, Adagrad, NAdam, RAdam, Adamax, ASGD)


@dataclass(frozen=True)
class Piece:
    """A parameter, or the part of it that this rank updates.

    Attributes:
        index: of the parameter in its bucket.
        parameter: the user's own.
        values: of this part.
        gradient: of this part.
        place: where this part is in the flattened parameter; None: it is the whole, in its shape.
    """

    index: int
    parameter: Tensor
    values: Tensor
    gradient: Tensor
    place: slice | None

    def cut(self, state: Any) -> Any:
        """Returns a copy of what an optimizer keeps for the parameter, or the part of it that belongs to this piece."""
        if not isinstance(state, Tensor):
            return state
        return state.clone() if self.place is None or state.dim() == 0 else state.reshape(-1)[self.place].clone()


class BucketUpdate:
    """Steps a copy of the user's optimizer that owns some pieces of parameters.

    The copy has the class and the attributes of the user's optimizer, and its hyper-parameters of the moment when the
    step was taken; the user's own never steps, and a scheduler may change it while the step is still under way.

    Args:
        optimizer: the user's own.
        group: which of its parameter groups the pieces belong to.
        pieces: what to update.
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

    def keep_hyperparameters(self) -> None:
        """Takes over learning rate and so on as they are now."""
        for name, value in self._optimizer.param_groups[self._group].items():
            if name != "params":
                self._copy.param_groups[0][name] = value.clone() if isinstance(value, Tensor) else value

    def apply(self, present: Sequence[bool]) -> None:
        """Updates the values by their gradients; those that are not ``present``, by index, stay as they are."""
        for piece in self._pieces:
            piece.values.grad = piece.gradient if present[piece.index] else None
        if self._pieces:
            self._copy.step()

    def state_dict(self) -> dict[str, Any]:
        """Returns the copy's state of its pieces."""
        return self._copy.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what :meth:`state_dict` returned on this rank."""
        self._copy.load_state_dict(state)


def can_be_sharded(optimizer: Optimizer, declared: tuple[type[Optimizer], ...]) -> bool:
    """Returns whether ``optimizer`` treats every value by itself, which a subclass of a known one may not do."""
    return type(optimizer) in (*ELEMENTWISE, *declared)
