"""The jobs and exhibits of each paper, and of what no paper has."""

from __future__ import annotations

from benchmarks.results.exhibit import Exhibit, Picture, Shown
from benchmarks.results.job import Job
from benchmarks.results.papers import (
    dear,
    ea_pipe,
    lecture,
    local_sgd,
    low_communication,
    package,
    pipe_sgd,
    selsync,
    selsync_motivation,
)

_PARTS = (dear, selsync, selsync_motivation, pipe_sgd, ea_pipe, lecture, local_sgd, low_communication, package)

#: All of them by name.
JOBS: dict[str, Job] = {job.name: job for part in _PARTS for job in part.JOBS}
_EXHIBITS: list[Exhibit] = [shown for part in _PARTS for shown in part.EXHIBITS]
TABLES: dict[str, Shown] = {shown.name: shown for shown in _EXHIBITS if not isinstance(shown, Picture)}
PICTURES: dict[str, Picture] = {shown.name: shown for shown in _EXHIBITS if isinstance(shown, Picture)}
