"""``python -m benchmarks.results``: measures what the docs show and has not been measured, and writes it there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.results import pages
from benchmarks.results.job import Job
from benchmarks.results.papers import JOBS, PICTURES, TABLES
from lightning_pipesync.core.names import did_you_mean


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Some of the jobs.

    Attributes:
        only: Names of jobs, or the first letters of several, such as dear; all jobs without it.
    """

    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.only:
            if not any(job.startswith(name) for job in JOBS):
                raise ValueError(f"only={name!r} is not the beginning of a job's name.{did_you_mean(name, JOBS)}")

    @property
    def jobs(self) -> list[Job]:
        return [job for job in JOBS.values() if not self.only or job.name.startswith(self.only)]


@dataclass(frozen=True, kw_only=True)
class Measure(Chosen):
    """Measures what the docs show and has not been measured, job by job, and makes their tables and pictures.

    What a job has measured is kept as soon as it has ended, in docs/measured, so that this may be stopped at any time,
    and goes on later. To measure something again, remove its file.

    Attributes:
        minutes: Begin no job that would not end within as many minutes from now; without it all are run.
    """

    minutes: float | None = None

    def run(self) -> int:
        """Returns 1 if a job failed; the others are run all the same."""
        failed = self._measure([job for job in self.jobs if not job.is_measured])
        Write().run()
        for message in failed:
            print(message)
        return 1 if failed else 0

    def _measure(self, jobs: Sequence[Job]) -> list[str]:
        start, failed = time.perf_counter(), []
        for number, job in enumerate(jobs, start=1):
            left = None if self.minutes is None else self.minutes - (time.perf_counter() - start) / 60
            if left is not None and job.minutes > left:
                continue
            print(f"{number} of {len(jobs)}: {job.name}, about {job.minutes:g} minutes\n  {job.command}", flush=True)
            try:
                job.run()
            except RuntimeError as error:
                failed.append(str(error))
                print(f"  {error}", flush=True)
        return failed


@dataclass(frozen=True, kw_only=True)
class List(Chosen):
    """Lists the jobs, and which of them have been measured."""

    def run(self) -> int:
        shown = Table("job", "minutes", "measured")
        for job in self.jobs:
            shown.add_row(job.name, f"{job.minutes:g}", "yes" if job.is_measured else "")
        Console().print(shown)
        minutes = sum(job.minutes for job in self.jobs)
        left = sum(job.minutes for job in self.jobs if not job.is_measured)
        print(f"{len(self.jobs)} jobs, {minutes:.0f} minutes; {left:.0f} are left.")
        return 0


@dataclass(frozen=True, kw_only=True)
class Write:
    """Makes the tables and pictures of what has been measured; measures nothing."""

    def run(self) -> int:
        pages.write(TABLES, PICTURES)
        return 0


SUBCOMMANDS: dict[str, type[Measure | List | Write]] = {"measure": Measure, "list": List, "write": Write}
