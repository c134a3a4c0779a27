"""The threshold delta on the relative gradient change (SelSync, Section III-B): given, or found while training."""

from __future__ import annotations

import math
from typing import Any

from lightning_pipesync.methods.selsync.config import SelSyncConfig

#: How much of the distance to the wanted share a single step makes good, in units of log delta.
GAIN = 0.5
#: Where ``delta="auto"`` begins, as a share of ``smoothing``, to which relative changes are proportional: so low that
#: the first steps are synchronized, until it has come up to the changes.
FIRST_DELTA = 0.01
#: Below it a relative change is a rounding error; a gradient that stays the same for long lowers delta no further.
SMALLEST_DELTA = 1e-12


class Threshold:
    """Decides which relative gradient change calls for a synchronized step.

    With ``delta="auto"`` it follows the quantile ``lssr`` of the largest change over all ranks, by the stochastic
    approximation of Robbins and Monro on log delta: each synchronized step raises it, each local one lowers it::

        log delta_{i+1} = log delta_i + GAIN * (synchronized_i - (1 - lssr)),    delta_0 = FIRST_DELTA * smoothing

    Whether a step was synchronized is known to all ranks, so that all have the same threshold and send nothing for
    it. After n steps the share of local ones is lssr - (log delta_n - log delta_0) / (GAIN * n), whatever the changes.

    Args:
        config: the settings.

    Attributes:
        delta: the threshold.
    """

    def __init__(self, config: SelSyncConfig) -> None:
        self._lssr: float | None = None
        if config.delta != "auto":
            self.delta = config.delta
        elif config.lssr == 0:
            self.delta = 0.0
        else:
            self.delta, self._lssr = FIRST_DELTA * config.smoothing, config.lssr

    def follow(self, synchronized: bool) -> None:
        """Takes what became of a step in which every rank's change was a finite number."""
        if self._lssr is not None:
            self.delta = max(self.delta * math.exp(GAIN * (synchronized - (1 - self._lssr))), SMALLEST_DELTA)

    def state_dict(self) -> dict[str, Any]:
        """Returns the threshold, if it moves."""
        return {} if self._lssr is None else {"delta": self.delta}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what :meth:`state_dict` returned; a threshold that is given, or was, begins as it is set."""
        if self._lssr is not None:
            self.delta = state.get("delta", self.delta)
