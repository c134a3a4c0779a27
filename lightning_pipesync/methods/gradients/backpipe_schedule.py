"""BackPipe (DeAR, Section III-B): what communicates when in the backward pass. Nothing here communicates.

The all-reduce of a bucket is two operations: a reduce-scatter of the gradients (OP1) and an all-gather (OP2). BackPipe
starts a reduce-scatter in the backward pass as soon as a bucket's gradients are ready. FeedPipe (`feedpipe.py`) starts
the all-gathers after the last reduce-scatter, but for those that DeAR starts before, and a module waits for its own
weights only, before its forward pass. Whole all-reduces under backward have the same schedule.

[Note: one order on all ranks]
Ranks must issue the same operations in the same order, also where their graphs, and with them the order of their
gradients, differ. So the orders of both halves are fixed for all ranks when the buckets are made, from what rank 0 has
observed.
"""

from __future__ import annotations

from collections.abc import Sequence


class BackPipeSchedule:
    """Which reduce-scatters start in one backward pass, as its gradients become ready.

    They start in the order of the buckets, see [Note: one order on all ranks]: that of a bucket when all of its
    gradients are ready and all earlier ones have started.

    Args:
        num_gradients: for each bucket the number of gradients that the backward pass computes.

    Attributes:
        num_started: number of buckets whose reduce-scatter has started: the first ones.
        outdated: whether a gradient has changed after the reduce-scatter of its bucket started.
    """

    def __init__(self, num_gradients: Sequence[int]) -> None:
        self._num_awaited = list(num_gradients)
        self.num_started = 0
        self.outdated = False

    def gradient_is_ready(self, bucket: int) -> range:
        """Returns the buckets whose reduce-scatter starts, now that a gradient of ``bucket`` is ready."""
        if bucket < self.num_started:
            self.outdated = True
            return range(0)
        self._num_awaited[bucket] -= 1
        end = self.num_started
        while end < len(self._num_awaited) and self._num_awaited[end] <= 0:
            end += 1
        return self._start(end)

    def finish(self) -> range:
        """Returns the buckets whose reduce-scatter starts at the end: those of which gradients are missing."""
        return self._start(len(self._num_awaited))

    def _start(self, end: int) -> range:
        started = range(self.num_started, end)
        self.num_started = end
        return started
