"""The steps of a training with several optimizers, of which each may take part in some of them."""

from __future__ import annotations

#: Steps after which an optimizer that has taken part in none of them counts as one that pauses.
PAUSES = 10


class TrainingSteps:
    """Counts the steps of a training: one begins with each optimizer that has taken part in the present one already.

    Args:
        optimizers: their number.
    """

    def __init__(self, optimizers: int) -> None:
        self._number, self._latest = 0, [0] * optimizers  # the present step, and the last one of each optimizer

    def take_part(self, index: int) -> bool:
        """Notes that an optimizer is about to step; returns whether a step of the training begins with it."""
        begins = self._latest[index] == self._number
        self._number += begins
        self._latest[index] = self._number
        return begins

    @property
    def first(self) -> int:
        """The first optimizer that does not pause."""
        return min(self._active)

    @property
    def last(self) -> int:
        """The last optimizer that does not pause."""
        return max(self._active)

    @property
    def _active(self) -> list[int]:
        return [index for index, latest in enumerate(self._latest) if self._number - latest < PAUSES]
