"""The logs of ``benchmarks.churn.replica``: which steps count, and when."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Line:
    """What a process of a replica has noted; see :mod:`benchmarks.churn.replica`."""

    time: float
    pid: int
    event: str
    rounds: int | None


def read(path: Path) -> list[Line]:
    """Returns the lines of a log, none if there is no log yet, without one that is still being written."""
    if not path.exists():
        return []
    return [Line(**json.loads(line)) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def rounds_of(lines: Sequence[Line]) -> list[tuple[float, int]]:
    """Returns when a replica has completed each round, and the number of its steps that the round has; sorted by time.

    A step counts in the round that is completed next, by the same process. If a later process repeats a round, from an
    older checkpoint, only that one counts. A process whose number of rounds jumps has got the weights of others
    instead of its own, and its steps until then do not count.
    """
    counted: dict[int, tuple[float, int]] = {}
    steps, before, pid = 0, None, 0
    for line in lines:
        if line.pid != pid or line.event in ("begin", "undone"):
            steps, before, pid = 0, line.rounds, line.pid
        elif line.event == "step" and line.rounds is not None and before is not None:
            steps += 1
            if line.rounds == before + 1:
                counted[line.rounds] = (line.time, steps)
            if line.rounds != before:
                steps, before = 0, line.rounds
    return sorted(counted.values())


def progress(logs: Sequence[Sequence[Line]], begin: float, end: float) -> list[tuple[float, int]]:
    """Returns when rounds were completed between two times, in seconds from ``begin``, and the steps of all so far."""
    total, points = 0, [(0.0, 0)]
    for time, steps in sorted(pair for lines in logs for pair in rounds_of(lines)):
        if begin < time <= end:
            total += steps
            points.append((time - begin, total))
    return points


def steps_at(points: Sequence[tuple[float, int]], time: float) -> int:
    """Returns the steps so far at a time, of what :func:`progress` returns."""
    return points[max(0, bisect_right(points, time, key=lambda point: point[0]) - 1)][1]
