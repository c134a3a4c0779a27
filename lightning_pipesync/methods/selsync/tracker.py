"""How much the gradient changes from step to step (SelSync, Section III-A)."""

from __future__ import annotations

import math
from collections import deque
from typing import Any


class GradientChangeTracker:
    """The relative gradient change of Eq. 2, from squared gradient norms smoothed over a window.

    E[x] at step i is the exponentially weighted moving average (EWMA) of the last ``window`` values, normalized so that
    it is a proper average from the first value on::

        E_i = sum_j (1 - smoothing)^j x_{i-j} / sum_j (1 - smoothing)^j,    j = 0 .. min(i, window) - 1

    Args:
        window: number of values that are smoothed.
        smoothing: weight of the newest value in an endless window, in (0, 1].
    """

    def __init__(self, window: int, smoothing: float) -> None:
        self._weights = [(1 - smoothing) ** age for age in range(window)]
        self._values: deque[float] = deque(maxlen=window)
        self._average = math.nan
        self._before: tuple[list[float], float] | None = None

    def update(self, squared_norm: float) -> float:
        """Takes the squared L2 norm of this step's gradient; returns the relative gradient change.

        It is infinite while there is only one value, and when the norm is not finite; such a norm is left out of the
        average, so that one overflow does not blind the tracker.
        """
        self._before = None
        if not math.isfinite(squared_norm):
            return math.inf
        previous = self._average
        full = len(self._values) == self._values.maxlen
        self._before = ([self._values[-1]] if full else [], previous)
        self._values.appendleft(squared_norm)
        weighted = sum(weight * value for weight, value in zip(self._weights, self._values, strict=False))
        self._average = weighted / sum(self._weights[: len(self._values)])
        if math.isnan(previous):
            return math.inf
        if previous == 0:
            return math.inf if self._average else 0.0
        return abs((self._average - previous) / previous)  # Eq. 2

    def forget_last(self) -> None:
        """Undoes the last :meth:`update`; it can be undone once."""
        if self._before is None:
            return
        dropped, self._average = self._before
        self._values.popleft()
        self._values.extend(dropped)
        self._before = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the window, newest value first, and its average."""
        return {"values": list(self._values), "average": self._average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what :meth:`state_dict` returned."""
        self._values = deque(state["values"], maxlen=self._values.maxlen)
        self._average = state["average"]
        self._before = None
