"""``python -m benchmarks.results``: runs the jobs of ``jobs.yaml``, whose numbers, tables and pictures the docs show.

A job is a command with its options. What it measured is kept as docs/measured/JOB.json: the command, the time,
versions and machine, the command's own table, and all measurements; its pictures are in docs/pictures. The numbers in
docs/results.md and docs/benchmarks.md are written by hand.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from lightning_pipesync import cli
from lightning_pipesync.core.files import replacing
from lightning_pipesync.core.names import did_you_mean
from lightning_pipesync.lab.bench.tables import environment

ROOT = Path(__file__).parents[1]
JOBS = Path(__file__).with_name("jobs.yaml")
MEASURED, PICTURES = ROOT / "docs" / "measured", ROOT / "docs" / "pictures"
#: A folder for each job, with its output and its log.
WORK = ROOT / "outputs" / "results"

#: Significant digits of the numbers that are kept.
_DIGITS = 6
#: Seconds that a job's processes get from SIGTERM to SIGKILL.
_GRACE_S = 30


@dataclass(frozen=True, kw_only=True)
class Job:
    """A command, as a user types it in a checkout.

    Attributes:
        name: Of its file in docs/measured.
        command: Takes ``--output FOLDER``, and writes one JSON file there, and its table as Markdown, if it has one.
        minutes: About how long it takes on two processors.
        shown: The page and the heading in docs that show it.
        pictures: By their names in docs/pictures, the pictures that the command draws.
    """

    name: str
    command: str
    minutes: float
    shown: str
    pictures: Mapping[str, str] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """The file with what it measured."""
        return MEASURED / f"{self.name}.json"

    @property
    def is_measured(self) -> bool:
        """Whether this very command has been run."""
        return self.path.exists() and json.loads(self.path.read_text())["command"] == self.command

    def run(self) -> None:
        """Runs the command, and keeps what it measured, its table and its pictures.

        Raises:
            RuntimeError: the command failed, or took more than four times as long as it should, and ten minutes.
        """
        folder = WORK / self.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        load, start = os.getloadavg()[0], time.perf_counter()
        status = self._run_command(folder, limit_s=60 * (4 * self.minutes + 10))
        written, tables = [*folder.glob("*.json")], [*folder.glob("*.md")]
        if status != 0 or len(written) != 1:
            raise RuntimeError(f"{self.name}: exit status {status}, {len(written)} results; see {folder}/log.txt")
        found = json.loads(written[0].read_text())
        minutes = (time.perf_counter() - start) / 60
        record = {
            "command": self.command,
            "measured": {**environment(), "load_before": load, "minutes": minutes},
            "kind": found["kind"],
            "table": [line for table in tables for line in table.read_text().splitlines()],
            "results": found["results"],
        }
        MEASURED.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as temporary:
            temporary.write_text(_as_lines(_rounded(record)))
        for name, drawn in self.pictures.items():
            shutil.copyfile(folder / drawn, PICTURES / f"{name}.png")

    def _run_command(self, folder: Path, limit_s: float) -> int:
        """Returns the exit status; after the limit no process of the command is left."""
        # ``python`` and ``pipesync`` of this environment come first.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        words = [*shlex.split(self.command), "--output", str(folder)]
        with (folder / "log.txt").open("w") as log:
            process = subprocess.Popen(
                words, stdout=log, stderr=log, cwd=ROOT, env={**os.environ, "PATH": path}, start_new_session=True
            )
            try:
                return process.wait(limit_s)
            except subprocess.TimeoutExpired:
                reason = f"not finished after {limit_s / 60:.3g} minutes"
                raise RuntimeError(f"{self.name}: {reason}; see {folder}/log.txt") from None
            finally:
                if process.poll() is None:
                    process.terminate()  # the command ends its ranks
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(_GRACE_S)
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def read_jobs() -> list[Job]:
    """Returns the jobs, in the order of the file."""
    return [Job(name=name, **settings) for name, settings in yaml.safe_load(JOBS.read_text()).items()]


def chosen(only: Sequence[str]) -> list[Job]:
    """Returns the jobs whose names begin with one of ``only``, or all; ValueError if one is no beginning of a name."""
    jobs = read_jobs()
    for name in only:
        if not any(job.name.startswith(name) for job in jobs):
            near = did_you_mean(name, [job.name for job in jobs])
            raise ValueError(f"only={name!r} is not the beginning of a job's name.{near}")
    return [job for job in jobs if not only or job.name.startswith((*only,))]


def measure(only: tuple[str, ...] = (), minutes: float | None = None) -> int:
    """Measures, job by job, what has not been measured with the command that the job has now.

    What a job has measured is kept as soon as it has ended, so that this may be stopped at any time, and goes on later.
    To measure something again, remove its file in docs/measured.

    Args:
        only: Names of jobs, or the first letters of several, such as dear; all jobs without it.
        minutes: Begins no job that would end later than this; without it all are run.

    Returns:
        1 if a job failed; the others are run all the same.
    """
    jobs = [job for job in chosen(only) if not job.is_measured]
    start, failed = time.perf_counter(), []
    for number, job in enumerate(jobs, start=1):
        left = math.inf if minutes is None else minutes - (time.perf_counter() - start) / 60
        if job.minutes > left:
            continue
        print(f"{number} of {len(jobs)}: {job.name}, about {job.minutes:g} minutes\n  {job.command}", flush=True)
        try:
            job.run()
        except RuntimeError as error:
            failed.append(str(error))
            print(f"  {error}", flush=True)
    for message in failed:
        print(message)
    return 1 if failed else 0


def list_jobs(only: tuple[str, ...] = ()) -> int:
    """Lists the jobs, where the docs show them, and which of them have been measured.

    Args:
        only: Names of jobs, or the first letters of several, such as dear; all jobs without it.
    """
    jobs, shown = chosen(only), Table("job", "minutes", "measured", "shown")
    for job in jobs:
        shown.add_row(job.name, f"{job.minutes:g}", "yes" if job.is_measured else "", job.shown)
    Console().print(shown)
    left = sum(job.minutes for job in jobs if not job.is_measured)
    print(f"{len(jobs)} jobs, {sum(job.minutes for job in jobs):.0f} minutes; {left:.0f} are left.")
    return 0


SUBCOMMANDS: dict[str, Callable[..., int]] = {"measure": measure, "list": list_jobs}


def main() -> int:
    words = sys.argv[1:]
    if words and words[0] in SUBCOMMANDS:
        words = cli.with_lists(words, SUBCOMMANDS[words[0]])
    status: int = cli.parse(SUBCOMMANDS, words, prog="python -m benchmarks.results")
    return status


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    return value


def _as_lines(record: Mapping[str, Any], depth: int = 4) -> str:
    """Returns JSON with a line for each value down to a depth, so that changes can be read."""

    def text(value: Any, left: int, indent: str) -> str:
        if left == 0 or not isinstance(value, dict | list) or not value:
            return json.dumps(value)
        inner = indent + " "
        if isinstance(value, dict):
            lines = [f"{inner}{json.dumps(key)}: {text(of_key, left - 1, inner)}" for key, of_key in value.items()]
            return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
        return "[\n" + ",\n".join(inner + text(one, left - 1, inner) for one in value) + f"\n{indent}]"

    return text(record, depth, "") + "\n"


if __name__ == "__main__":
    sys.exit(cli.exit_status(main))
