"""The forward and backward passes of a rank, on an emulated host that takes longer for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import repeat

from torch import Tensor

#: The longest sleep between two checks whether the pass is still wanted.
SLICE_S = 5e-3


class Passes:
    """Runs passes that take at least a given time each.

    The rest of the time is slept between forward and backward, so that what a method exchanges under the backward pass
    comes as late as it would if all layers took longer, and so that the hosts do not compete for this machine's
    processors. The next backward pass is expected to take the processor time of the last.

    Args:
        seconds: the least seconds of each pass.
    """

    def __init__(self, seconds: Iterator[float] | None = None) -> None:
        self._seconds = repeat(0.0) if seconds is None else seconds
        self._backward_s = 0.0

    def run(self, forward: Callable[[], Tensor], check: Callable[[], object] = lambda: None) -> float:
        """Runs a forward and a backward pass.

        Args:
            forward: computes the loss.
            check: called every few ms while the rest of the time is slept; may raise, to end the pass.

        Returns:
            The loss.
        """
        end = time.perf_counter() + next(self._seconds) - self._backward_s
        loss = forward()
        while (rest := end - time.perf_counter()) > 0:
            check()
            time.sleep(min(rest, SLICE_S))
        begin = time.thread_time()
        loss.backward()
        self._backward_s = time.thread_time() - begin
        return loss.item()
