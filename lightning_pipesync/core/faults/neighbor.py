"""The rank that this one listens to, so that a rank that falls silent is found whatever all others wait for.

[Note: each listens to the next]
A frozen process breaks no connection, and ranks that wait for it in another library's collective would wait for as long
as that group allows. So each rank listens for the beats of the next one, or of the one after that if it has ended: one
query at a time, whatever the number of ranks. Of several silent ranks, one comes after a rank that is not, and the
fault of one ends the waits of all.
"""

from __future__ import annotations

from lightning_pipesync.core.faults.heartbeat import Beat

#: How often it is heard, as a fraction of the timeout, and the maximum in seconds.
FRACTION_OF_TIMEOUT, MAXIMUM_S = 1 / 8, 10.0


class Neighbor:
    """The next rank, in a ring, that has not ended.

    Args:
        rank: this rank.
        timeout_s: seconds of silence after which a rank counts as lost.
    """

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        self._rank, self._world_size, self._timeout_s = rank, world_size, timeout_s
        self._every_s = min(MAXIMUM_S, timeout_s * FRACTION_OF_TIMEOUT)
        self._last_heard: float | None = None  # by the clock of the caller
        self._number, self._silent_s = -1, 0.0
        self.rank = rank
        self._pass_on()

    def is_due(self, now: float) -> bool:
        """Returns whether :meth:`hear` is to be called, at ``now`` seconds; never, if all others have ended."""
        return self.rank != self._rank and (self._last_heard is None or now >= self._last_heard + self._every_s)

    def hear(self, beat: Beat, now: float) -> bool:
        """Takes the last beat of :attr:`rank`; returns whether it has been silent for the timeout.

        Of the time since the last call, as much counts as is usual: this process may have been frozen itself.
        """
        elapsed = 0.0 if self._last_heard is None else min(now - self._last_heard, 2 * self._every_s)
        self._last_heard = now
        if beat.left is not None:
            self._pass_on()
            return False
        self._silent_s = self._silent_s + elapsed if beat.number == self._number else 0.0
        self._number = beat.number
        return self._silent_s >= self._timeout_s

    def _pass_on(self) -> None:
        self.rank = (self.rank + 1) % self._world_size
        self._number, self._silent_s = -1, 0.0
