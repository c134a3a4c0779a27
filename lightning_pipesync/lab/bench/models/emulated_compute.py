"""Emulates computation by sleeping, with an exact sum over hundreds of layers."""

from __future__ import annotations

import time

#: The shortest sleep; less is carried over, because a sleep takes 0.05 ms or more longer than requested.
_SHORTEST_SLEEP_S = 0.5e-3
#: The most time between two layers that counts as theirs: the interpreter needs 0.01 to 0.04 ms, or more if busy.
_LONGEST_DISPATCH_S = 0.05e-3
#: The most lateness that later layers make up for: a process that was stopped must not skip its work.
_LARGEST_CREDIT_S = 0.1


class EmulatedCompute:
    """The emulated computation of a model, which accounts for the time that its layers should and do take.

    Only time within a layer counts, and the first 0.05 ms between two layers, in which Python calls the next one: on an
    accelerator the host runs ahead and hides it. Longer waits of hooks, such as for communication, do not count. A
    layer that ends late, because a sleep was too long or the processor busy, makes later layers shorter.

    Attributes:
        forward_seconds: the duration of the forward pass of the whole model. May be set between steps.
        backward_seconds: the duration of its backward pass. May be set between steps.

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
        """Sleeps until ``seconds`` have passed since ``since`` (``time.perf_counter``), plus the time carried over."""
        dispatch = min(since - self._ended, _LONGEST_DISPATCH_S)
        self._owed += seconds - dispatch - (time.perf_counter() - since)
        if self._owed >= _SHORTEST_SLEEP_S:
            begin = time.perf_counter()
            time.sleep(self._owed)
            self._owed -= time.perf_counter() - begin
        self._owed = max(self._owed, -_LARGEST_CREDIT_S)
        self._ended = time.perf_counter()
