"""When a replica leaves that was asked to: after the next round, or at once if that comes too late."""

from __future__ import annotations

import time
from collections.abc import Callable

from lightning_pipesync.core.faults.notice import Notice

#: What all ranks of a job agree on at each step; of several wishes the last one counts.
STAYS, AFTER_ROUND, NOW = range(3)

#: Seconds of a step, at least, when it is foretold how many there will be.
SHORTEST_STEP_S = 1e-3


class Departure:
    """Decides at which step a replica leaves, on all ranks of its job, of which any may have been asked.

    One that leaves after a round loses nothing, so it trains on until then, if there is time.

    Args:
        greatest: returns the greatest of the numbers of all ranks of the job, each of which gives it one.

    Attributes:
        notice: by which this rank is asked.
        is_now: whether the replica leaves at the end of this step, and the next round would come too late.
    """

    def __init__(self, greatest: Callable[[int], int]) -> None:
        self.notice, self.is_now = Notice(), False
        self._greatest = greatest
        self._agreed = STAYS
        self._began = time.monotonic()  # the present step

    @property
    def deadline(self) -> float | None:
        """The time, of ``time.monotonic``, by which it leaves, with a round if one has begun; None: it stays."""
        return self.notice.deadline if self._agreed else None

    def begin_step(self, starts_in: Callable[[int], bool]) -> None:
        """Agrees with the other ranks of the job at a step; ``starts_in(n)``: a round may start at the nth's end."""
        now = time.monotonic()
        step_s, self._began = max(SHORTEST_STEP_S, now - self._began), now
        wish = STAYS
        if self.notice.deadline is not None:
            in_time = 1 + int(max(0.0, self.notice.deadline - now) / step_s)  # at least the one that may be due now
            wish = AFTER_ROUND if any(starts_in(steps) for steps in range(1, 1 + in_time)) else NOW
        self._agreed = self._greatest(wish)
        self.is_now = self._agreed == NOW
        if self._agreed:
            self.notice.give()
