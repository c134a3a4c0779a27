"""The schedule of Pipe-SGD (Algorithm 1): which gradient updates the weights at which step. Nothing here communicates.

[Note: the paper's index and ours]
In the paper, iteration t begins with the update by the gradient of iteration t - (k + 1), and then computes gradient t.
A training loop computes first and updates then: our step t computes gradient t, submits it, and ends with the update
that begins the paper's iteration t + 1, by gradient t - k. It is the same sequence. With k = 1 the weights of iteration
t come from gradient t - 2: "each iteration depends on the 2nd last" (Fig. 6).
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

G = TypeVar("G")


class Pipeline(Generic[G]):
    """The gradients in flight, oldest first, and when each is due.

    An update is ``staleness`` (k) steps later than its gradient, after ``warmup_steps`` synchronous steps.
    """

    def __init__(self, staleness: int, warmup_steps: int) -> None:
        self._max_in_flight, self._warmup_steps = staleness, warmup_steps
        self.in_flight: deque[G] = deque()
        self.num_steps = self.num_updates = 0
        self.staleness = 0  # updates by which the gradient of the last one was late; less than k while it fills

    def submit(self, gradient: G) -> None:
        """Adds the gradient of this step (computation thread, line 10)."""
        self.in_flight.append(gradient)

    @property
    def due(self) -> G | None:
        """The gradient that this step applies (computation thread, line 3).

        None while the pipeline fills: the paper applies gradients of zero there, this pipeline makes no update.
        """
        max_in_flight = 0 if self.num_steps < self._warmup_steps else self._max_in_flight
        return self.in_flight[0] if len(self.in_flight) > max_in_flight else None

    def retire(self) -> G:
        """Removes the oldest gradient, which is about to be applied."""
        return self.in_flight.popleft()

    def count_update(self, num_updates: int) -> None:
        """Counts an update (line 5), whose gradient was computed after ``num_updates`` updates."""
        self.staleness = self.num_updates - num_updates
        self.num_updates += 1

    def end_step(self) -> None:
        """Ends a step, taken or skipped."""
        self.num_steps += 1
