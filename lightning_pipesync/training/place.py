"""What a job that comes gets from the others, besides the method's state and the place in the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

#: By kind, such as "schedulers", what has a ``state_dict`` and its counterpart.
Parts = Mapping[str, Sequence[Any]]

#: By a number's name, such as "batches a step": the number, and how a user makes it the same in all jobs.
Common = Mapping[str, tuple[int, str]]


class HandedOver:
    """The states of a framework's objects, such as schedulers, which a job that comes loads before its first step.

    Args:
        parts: returns the objects.
        common: returns the numbers that all jobs must have in common.
    """

    def __init__(self, parts: Callable[[], Parts], common: Callable[[], Common] = dict) -> None:
        self._parts, self._common = parts, common

    def state_dict(self) -> dict[str, Any]:
        """Returns the states, as they are between two steps."""
        return {
            "common": {name: number for name, (number, _) in self._common().items()},
            "parts": {kind: [part.state_dict() for part in parts] for kind, parts in self._parts().items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from another job's states.

        Raises:
            ValueError: this job has another number in common, or other objects.
        """
        check_common(self._common(), state["common"])
        way_out = "prepare and register the same ones on all, before the first batch"
        present = self._parts()
        check_common(
            {kind: (len(parts), way_out) for kind, parts in present.items()},
            {kind: len(states) for kind, states in state["parts"].items()},
        )
        for kind, parts in present.items():
            for part, saved in zip(parts, state["parts"][kind], strict=True):
                part.load_state_dict(saved)


def check_common(here: Common, there: Mapping[str, int]) -> None:
    """Raises a ValueError if this job and another one differ in a number."""
    for name, (number, way_out) in here.items():
        if there[name] != number:
            raise ValueError(f"This replica has {number} {name}, and the others have {there[name]}: {way_out}.")
