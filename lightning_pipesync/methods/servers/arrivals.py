"""What learners tell the coordinator, in their order.

[Note: half a gradient]
A learner may be lost when some servers have its gradient and others do not, and an update by that gradient would never
end. So where the others go on without a lost learner, all servers tell the coordinator what arrives, a gradient counts
once all of them have it, and what its learner tells later waits for that.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator

from lightning_pipesync.methods.servers.messages import Request
from lightning_pipesync.methods.servers.policies import Gradient


class Arrivals:
    """Puts what the learners tell in order, see [Note: half a gradient].

    Args:
        num_parts: the number of servers that tell when they have a gradient.
    """

    def __init__(self, num_parts: int) -> None:
        self._num_parts = num_parts
        self._told: defaultdict[int, deque[Gradient | Request]] = defaultdict(deque)  # by learner
        self._parts: Counter[Gradient] = Counter()

    def tell(self, rank: int, what: Gradient | Request) -> None:
        """Takes what a learner tells the coordinator."""
        self._told[rank].append(what)

    def part(self, gradient: Gradient) -> None:
        """Takes that another server has a gradient."""
        self._parts[gradient] += 1

    def ready(self, rank: int) -> Iterator[Gradient | Request]:
        """Yields what a learner has told, up to a gradient that some server does not have yet."""
        told = self._told[rank]
        while told:
            what = told[0]
            if isinstance(what, Gradient):
                if self._parts[what] < self._num_parts:
                    return
                del self._parts[what]
            yield told.popleft()

    def lose(self, rank: int) -> list[Gradient]:
        """Forgets a learner that is lost; returns its gradients that only some servers have."""
        told = self._told.pop(rank, ())
        halves = {what for what in told if isinstance(what, Gradient)}
        halves |= {gradient for gradient in self._parts if gradient.rank == rank}
        for gradient in halves:
            self._parts.pop(gradient, None)
        return sorted(halves, key=lambda gradient: gradient.step)
