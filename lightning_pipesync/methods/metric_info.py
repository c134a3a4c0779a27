"""What a method's metrics are: their meaning, their unit, and how they are reduced over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from types import MappingProxyType
from typing import Literal


@dataclass(frozen=True)
class MetricInfo:
    """What a metric is, beside the method that returns it: the table on the method's page is made of it.

    Args:
        meaning: what it counts or measures, in a few words.
        unit: that of its values; empty for numbers and shares.
        over_ranks: what :meth:`reduce` returns of the ranks' values. ``"same"``: that of all ranks; ``"rank 0"``: that
            of rank 0, as others have none; ``"mean"`` or ``"max"``.
    """

    meaning: str = ""
    unit: str = ""
    over_ranks: Literal["same", "rank 0", "mean", "max"] = "mean"

    @property
    def differs(self) -> bool:
        """Whether ranks may have different values."""
        return self.over_ranks in ("mean", "max")

    def reduce(self, values: Sequence[float]) -> float:
        """Returns one value for all ranks, from the values of those that have one."""
        if not self.differs:
            return values[0]
        return max(values) if self.over_ranks == "max" else fmean(values)


#: Metrics of all methods.
NETWORK_METRICS = MappingProxyType(
    {
        "mib_sent": MetricInfo("payload that a rank has sent so far, all of the method's", "MiB", "max"),
        "exposed_seconds": MetricInfo("time that training has waited for communication so far", "s"),
    }
)


def counted(number: float, noun: str) -> str:
    """Returns a number of things, in words: ``"1 step"``, ``"2000000 steps"``."""
    return f"{number:.0f} {noun}" if number == 1 else f"{number:.0f} {noun}s"
