"""Sleeps in place of computation, so that the sum over hundreds of layers is right."""

from __future__ import annotations

import time

#: Less than this is owed until more has come together: a sleep takes 0.05 ms and more longer than it was asked to.
_SHORTEST_SLEEP_S = 0.5e-3
#: So much between two layers is the interpreter's own and counts as theirs (0.01 to 0.04 ms, more on a busy machine).
_LONGEST_DISPATCH_S = 0.05e-3
#: A process that was stopped or starved for longer than this does not catch up by skipping its work.
_LARGEST_CREDIT_S = 0.1


class Pacer:
    """Keeps account of how long the layers of a model should have taken, and of how long they did.

    Only time within a layer counts, and the first 0.05 ms between two of them, in which Python calls the next one: on
    an accelerator the host runs ahead and hides them. What a hook waits for beyond that, communication above all, is
    not made up for. A layer that ends late, since a sleep was too long or the processor busy, makes those after it
    shorter.

    Attributes:
        forward_seconds: what the forward pass of the whole model takes. May be set between steps.
        backward_seconds: what its backward pass takes. May be set between steps.

    Raises:
        ValueError: one of them is negative or not finite.
    """

    def __init__(self, forward_seconds: float, backward_seconds: float) -> None:
        for name, seconds in (("forward_seconds", forward_seconds), ("backward_seconds", backward_seconds)):
            if not 0 <= seconds < float("inf"):
                raise ValueError(f"{name} must be a number of seconds, 0 or more, got {seconds!r}.")
        self.forward_seconds = forward_seconds
        self.backward_seconds = backward_seconds
        self._owed = 0.0
        self._ended = 0.0

    def spend(self, seconds: float, since: float) -> None:
        """Sleeps until ``seconds`` have passed since ``since`` (``time.perf_counter``), and what was owed before."""
        dispatch = min(since - self._ended, _LONGEST_DISPATCH_S)
        self._owed += seconds - dispatch - (time.perf_counter() - since)
        if self._owed >= _SHORTEST_SLEEP_S:
            begin = time.perf_counter()
            time.sleep(self._owed)
            self._owed -= time.perf_counter() - begin
        self._owed = max(self._owed, -_LARGEST_CREDIT_S)
        self._ended = time.perf_counter()
