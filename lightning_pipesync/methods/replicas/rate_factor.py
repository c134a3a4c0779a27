"""How many times as seldom replicas are averaged as at the largest learning rate.

[Note: averages that follow the learning rate]
How far replicas move apart between two averages is proportional to the learning rate, so that H local steps at the
largest rate cost as much as 10 H at a tenth of it. The quadratic synchronization rule (Gu et al., "A Quadratic
Synchronization Rule for Distributed Deep Learning", ICLR 2024) lets H grow with the inverse square of the rate, from a
constant that has to be found; here H is that of the largest rate so far, and grows with the inverse.
"""

from __future__ import annotations

from torch.optim import Optimizer

#: The factor is this at most.
LARGEST = 10.0


class RateFactor:
    """The largest learning rate of an optimizer so far over the present one; ``optimizer`` None: always 1.

    Attributes:
        largest: the largest rate of each parameter group, a new list at each change.
    """

    def __init__(self, optimizer: Optimizer | None) -> None:
        self._optimizer = optimizer
        self.largest: list[float] = []

    @property
    def changes(self) -> bool:
        """Whether it may be above 1."""
        return self._optimizer is not None

    def now(self) -> float:
        """Returns the factor, from 1 to :data:`LARGEST`: the least of those of the parameter groups."""
        if self._optimizer is None:
            return 1.0
        rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        known = [*self.largest, *rates[len(self.largest) :]]
        self.largest = [max(pair) for pair in zip(rates, known, strict=True)]
        pairs = [(rate, largest) for rate, largest in zip(rates, self.largest, strict=True) if largest > 0]
        return min((largest / max(rate, largest / LARGEST) for rate, largest in pairs), default=1.0)
