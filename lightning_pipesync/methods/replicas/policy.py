"""When averages start: the part of the engine that each method fills in."""

from __future__ import annotations

from typing import Any


class AveragingPolicy:
    """Decides at the end of which steps of an optimizer averages start, the same on all ranks.

    Attributes:
        averages_gradients: whether it averages the gradients before the update, not the weights after it.
    """

    averages_gradients = False

    def may_start(self, step: int) -> bool:
        """Returns whether averages may start at the end of a step; the first one after a warm-up is 1.

        Called several times for a step, also ahead of it: it changes nothing.
        """
        raise NotImplementedError

    def end_step(self, step: int) -> int:
        """Called once at the end of each step after a warm-up; returns how many averages start now.

        Each is that of a fragment, the next one in turn; without ``fragments`` the whole model is one. With
        ``averages_gradients``, returns 1 if :meth:`complete_gradient` has averaged the gradient.
        """
        raise NotImplementedError

    def complete_gradient(self) -> bool:
        """Called once in each step, when the gradient is complete, before it is clipped.

        Returns whether it was averaged with a gradient that is not finite.
        """
        return False

    def skip_step(self) -> None:
        """Undoes :meth:`complete_gradient`: the step was skipped. Raises a RuntimeError if not by all ranks."""

    def check_consolidation(self) -> None:
        """Raises a RuntimeError unless all ranks are about to consolidate the weights; a collective call."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what this rank needs to resume; with ``lighthouse`` also to undo a round, and for a new replica."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from what :meth:`state_dict` returned on this rank; with ``lighthouse`` also on another one."""
