"""Means with their confidence intervals, in tables."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import stdev


def number(value: float | None, form: str) -> str:
    """Returns a number in this format; a dash if there is none."""
    return "-" if value is None else format(value, form)


def with_interval(value: float, interval: float | None, form: str = ".2f") -> str:
    """Returns a number in this format, and the half of its confidence interval, if there is one."""
    return format(value, form) if interval is None else f"{value:{form}} ± {interval:.2f}"


def interval_of(values: Sequence[float]) -> float | None:
    """Returns half the 95 % confidence interval of the mean (Student's t); None for fewer than two values."""
    from scipy.stats import t

    if len(values) < 2:
        return None
    return float(t.ppf(0.975, len(values) - 1)) * stdev(values) / len(values) ** 0.5
