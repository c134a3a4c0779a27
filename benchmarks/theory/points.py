"""Where the curves of measurements and bounds have their points."""

from __future__ import annotations


def points_of(end: int, number: int) -> list[int]:
    """Returns at most ``number`` numbers from 1 to ``end``, evenly on a logarithmic scale."""
    return sorted({round(end ** (i / (number - 1))) for i in range(number)})
