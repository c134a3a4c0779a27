"""Selective synchronization (SelSync, Algorithm 1): which steps the ranks synchronize. Nothing here communicates.

One rank does in a step::

    flag = algorithm.measure(squared_norm)      # lines 7, 8, 11 and 12
    flags = all_gather(flag)                    # line 14
    if algorithm.decide(flags).synchronized:    # line 15
        average the parameters                  # lines 16 and 17
    algorithm.finish_step()
"""

from __future__ import annotations

import functools
import math
import operator
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_pipesync.methods.replicas.flags import CONSOLIDATE, check_same
from lightning_pipesync.methods.replicas.settings import ReplicaSettings

# With ``delta="auto"``:
GAIN = 0.5  # step size of the search, in units of log delta
FIRST_DELTA = 0.01  # first delta / smoothing, to which relative changes are proportional; low: first steps synchronize
SMALLEST_DELTA = 1e-12  # smaller changes are rounding errors

# The bits of a rank's flag (Algorithm 1, ``flags[n]``), which is one byte:
SYNCHRONIZE = 1  # its relative gradient change is at least delta
MISSING_GRADIENT = 2  # a parameter has no gradient
NOT_FINITE = 4  # its gradient is not finite
SKIPPED = 8, 16  # it has skipped an even or an odd number of steps; one of the two is set in every flag
UNDEFINED = 32  # its relative gradient change is not defined: the step is synchronized, and does not update delta


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

        log delta_{i+1} = log delta_i + GAIN * (synchronized_i - (1 - lssr)),    delta_0 = FIRST_DELTA * smoothing

    All ranks know which steps were synchronized, so that all have the same threshold without communication. After n
    steps the share of local ones is lssr - (log delta_n - log delta_0) / (GAIN * n), whatever the changes are.

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

    def update(self, synchronized: bool) -> None:
        if self._lssr is not None:
            self.delta = max(self.delta * math.exp(GAIN * (synchronized - (1 - self._lssr))), SMALLEST_DELTA)

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


class SelectiveSync:
    """Algorithm 1 on one rank, for the gradient of one optimizer.

    Attributes:
        decision: the decision about this step; None before :meth:`decide`.
        is_local: whether no step is ever synchronized.
    """

    def __init__(self, settings: ReplicaSettings, name: str) -> None:
        self.tracker = GradientChangeTracker(settings.window, settings.smoothing)
        self.threshold = Threshold(settings)
        self.decision: SyncDecision | None = None
        self.is_local = settings.delta == math.inf
        self._name = name
        self._change = math.inf
        self._num_skipped = 0

    def measure(self, squared_norm: float, missing_gradient: bool = False, skipping: bool = False) -> int:
        """Updates the tracker with this step's gradient (line 8); returns this rank's flag (lines 11 and 12).

        ``skipping``: whether the user has skipped the step before this rank sends its flag.
        """
        self._change = self.tracker.update(squared_norm)
        flag = SYNCHRONIZE * (self._change >= self.threshold.delta and not self.is_local)
        flag |= UNDEFINED * math.isinf(self._change)
        flag |= MISSING_GRADIENT * missing_gradient
        flag |= NOT_FINITE * (not math.isfinite(squared_norm))
        return flag | self._skipped_flag(skipping)

    def decide(self, flags: Sequence[int]) -> SyncDecision:
        """Decides whether the step is synchronized (line 15).

        Args:
            flags: of all ranks; empty if no step is ever synchronized.

        Raises:
            RuntimeError: some rank has skipped a step that another one has taken.
        """
        self.check(flags)
        union = functools.reduce(operator.or_, flags, 0)
        self.decision = SyncDecision(
            self._change,
            self.threshold.delta,
            synchronized=bool(union & SYNCHRONIZE),
            missing_gradient=bool(union & MISSING_GRADIENT),
            not_finite=bool(union & NOT_FINITE),
            undefined=bool(union & UNDEFINED),
        )
        return self.decision

    def finish_step(self) -> None:
        """Updates delta, unless the change of some rank was not defined."""
        assert self.decision is not None
        if not self.decision.undefined:
            self.threshold.update(self.decision.synchronized)
        self.decision = None

    def skip_step(self, flags: Sequence[int]) -> None:
        """Undoes :meth:`measure`: the user has skipped the step. Arguments and errors as of :meth:`decide`."""
        self.check(flags)
        self.tracker.undo()
        self._num_skipped += 1
        self.decision = None

    def consolidation_flag(self, skipping: bool) -> int:
        """Returns the flag of a rank that is about to consolidate the weights; ``skipping`` as in :meth:`measure`."""
        return self._skipped_flag(skipping) | CONSOLIDATE

    def check(self, flags: Sequence[int]) -> None:
        """Raises a RuntimeError unless all ranks consolidate or none, and all have skipped the same steps."""
        check_same(
            flags,
            f"have not skipped the same steps of {self._name}. Once its gradient has been measured, by clipping it or "
            "by reduce(), all ranks take the step, or none: decide by what is the same on all ranks; for a step that "
            "changes nothing, set the gradients to zero.",
            mask=sum(SKIPPED),
        )

    def _skipped_flag(self, skipping: bool) -> int:
        return SKIPPED[(self._num_skipped + skipping) % 2]
