"""The relative gradient change, its threshold delta, and what they decide (SelSync, Sections III-A and III-B)."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

from lightning_pipesync.methods.replicas.settings import ReplicaSettings

# With ``delta="auto"``:
GAIN = 0.5  # step size of the search, in units of log delta
FIRST_DELTA = 0.01  # first delta / smoothing, to which relative changes are proportional; low: first steps synchronize
SMALLEST_DELTA = 1e-12  # smaller changes are rounding errors


class GradientChangeTracker:
    """The relative gradient change (Eq. 2) of squared gradient norms smoothed over a window (Section III-A).

    E[x] at step i is the exponentially weighted moving average (EWMA) of the last ``window`` values, normalized so that
    it is a proper average from the first value on::

        E_i = sum_j (1 - smoothing)^j x_{i-j} / sum_j (1 - smoothing)^j,    j = 0 .. min(i, window) - 1

    ``smoothing`` is the weight of the newest value in an infinite window, in (0, 1].
    """

    def __init__(self, window: int, smoothing: float) -> None:
        self._weights = [(1 - smoothing) ** age for age in range(window)]
        self._values: deque[float] = deque(maxlen=window)
        self._average = math.nan
        self._before: dict[str, Any] | None = None

    def update(self, squared_norm: float) -> float:
        """Adds the squared L2 norm of this step's gradient; returns the relative gradient change.

        The change is infinite for the first value and for one that is not finite. The average ignores a value that is
        not finite, so that one overflow does not disable the tracker.
        """
        self._before = self.state_dict()
        if not math.isfinite(squared_norm):
            return math.inf
        previous = self._average
        self._values.appendleft(squared_norm)
        weighted = sum(weight * value for weight, value in zip(self._weights, self._values, strict=False))
        self._average = weighted / sum(self._weights[: len(self._values)])
        if math.isnan(previous):
            return math.inf
        if previous == 0:
            return math.inf if self._average else 0.0
        return abs((self._average - previous) / previous)  # Eq. 2

    def undo(self) -> None:
        """Undoes the last :meth:`update`. Only one update can be undone."""
        if self._before is not None:
            self.load_state_dict(self._before)

    def state_dict(self) -> dict[str, Any]:
        """Returns the window, newest value first, and its average."""
        return {"values": list(self._values), "average": self._average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from what :meth:`state_dict` returned."""
        self._values = deque(state["values"], maxlen=self._values.maxlen)
        self._average = state["average"]
        self._before = None


class Threshold:
    """The threshold delta on the relative gradient change (Section III-B): constant, or found during training.

    With ``delta="auto"`` it follows the quantile ``lssr`` of the largest change over all ranks, by the stochastic
    approximation of Robbins and Monro on log delta: each synchronized step raises it, each local one lowers it::

        log delta_{i+1} = log delta_i + GAIN * (synchronized_i - (1 - lssr) / r_i),    delta_0 = FIRST_DELTA * smoothing

    where r_i is how much smaller the learning rate is than at its largest (:class:`RateFactor`), or 1.

    All ranks know which steps were synchronized, so that all have the same threshold without communication. After n
    steps at one rate the share of local ones is lssr - (log delta_n - log delta_0) / (GAIN * n), whatever the changes
    are.

    Attributes:
        delta: the threshold.
    """

    def __init__(self, settings: ReplicaSettings) -> None:
        self._lssr: float | None = None
        self._given: float | None = None  # the constant; what the user sets by hand later is in ``delta`` only
        if settings.delta != "auto":
            self.delta = self._given = settings.delta
        elif settings.lssr == 0:
            self.delta = self._given = 0.0
        else:
            self.delta, self._lssr = FIRST_DELTA * settings.smoothing, settings.lssr

    def update(self, synchronized: bool, rate_factor: float = 1.0) -> None:
        if self._lssr is not None:
            error = synchronized - (1 - self._lssr) / rate_factor
            self.delta = max(self.delta * math.exp(GAIN * error), SMALLEST_DELTA)

    def state_dict(self) -> dict[str, Any]:
        return {"delta": self.delta, "given": self._given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from :meth:`state_dict`, if delta was found then and is now, or the constant is the same."""
        if state["given"] == self._given:
            self.delta = state["delta"]


@dataclass(frozen=True)
class SyncDecision:
    """The decision about a step: the same on all ranks, except for this rank's ``relative_change`` (Eq. 2)."""

    relative_change: float = math.inf  #: on this rank; inf where it is not defined
    delta: float = math.nan  #: the threshold
    synchronized: bool = False  #: whether the change was at least ``delta`` on some rank
    missing_gradient: bool = False  #: whether a parameter had no gradient on some rank
    not_finite: bool = False  #: whether the gradient was not finite on some rank
    undefined: bool = False  #: whether the change was not defined on some rank
