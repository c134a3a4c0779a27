"""A measurement: a command, and the file with what it measured."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_pipesync.core.files import replacing
from lightning_pipesync.lab.bench.tables import environment

ROOT = Path(__file__).parents[2]
#: A file for each job that has been run.
MEASURED = ROOT / "docs" / "measured"
#: A folder for each job, with its output and its log.
WORK = ROOT / "outputs" / "results"

#: Significant digits of the numbers that are kept.
_DIGITS = 6


def path_of(job: str) -> Path:
    """Returns the file with what a job has measured."""
    return MEASURED / f"{job}.json"


@dataclass(frozen=True)
class Job:
    """A command, as a user types it in a checkout."""

    name: str
    command: str
    #: About how long it takes on two processors.
    minutes: float
    #: Returns what the exhibits need of the results, if that is much less.
    keep: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] = list

    @property
    def is_measured(self) -> bool:
        """Whether this very command has been run."""
        return path_of(self.name).exists() and Record.read(self.name).command == self.command

    def run(self) -> None:
        """Runs the command, and keeps what it measured.

        Raises:
            RuntimeError: the command failed, or took more than four times as long as it should, and ten minutes.
        """
        folder = WORK / self.name
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.json"):
            old.unlink()
        load, start = os.getloadavg()[0], time.perf_counter()
        limit_s = 60 * (4 * self.minutes + 10)
        with (folder / "log.txt").open("w") as log:
            words = [*shlex.split(self.command), "--output", str(folder)]
            process = subprocess.Popen(words, stdout=log, stderr=log, cwd=ROOT, env=_this_python_first())
            try:
                status = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                reason = f"not finished after {limit_s / 60:.0f} minutes"
                raise RuntimeError(f"{self.name}: {reason}; see {folder}/log.txt") from None
            finally:
                process.terminate()  # if it has not ended
                process.wait()
        written = [*folder.glob("*.json")]
        if status != 0 or len(written) != 1:
            raise RuntimeError(f"{self.name}: exit status {status}, {len(written)} results; see {folder}/log.txt")
        minutes = (time.perf_counter() - start) / 60
        measured = {**environment(), "load_before": load, "minutes": minutes}
        found = json.loads(written[0].read_text())
        found["results"] = self.keep(found["results"])
        record = {"command": self.command, "measured": measured, **found}
        MEASURED.mkdir(parents=True, exist_ok=True)
        with replacing(path_of(self.name)) as temporary:
            temporary.write_text(_as_lines(_rounded(record)))


@dataclass(frozen=True)
class Record:
    """What a job has measured."""

    name: str
    command: str
    #: The kind of the results: the name of the benchmark.
    kind: str
    #: The time, versions and machine.
    measured: Mapping[str, Any]
    #: One for each number of hosts, or one.
    results: list[dict[str, Any]]

    @classmethod
    def read(cls, name: str) -> Record:
        """Reads the file of a job; FileNotFoundError if it has never been run."""
        found = json.loads(path_of(name).read_text())
        return cls(name, found["command"], found["kind"], found["measured"], found["results"])

    @property
    def provenance(self) -> str:
        """When, with what, and where it was measured, and with which seeds."""
        when, version = self.measured["time"][:10], self.measured["versions"].get("lightning-pipesync")
        torch = self.measured["versions"]["torch"].partition("+")[0]
        parts = [
            f"{when}, version {version} ({self.measured['commit']}), torch {torch}",
            f"{self.measured['cpus']} processors ({self.measured['machine']})",
        ]
        seeds = dict.fromkeys(seed for one in self.results for seed in one.get("settings", {}).get("seeds", ()))
        if seeds:
            parts.append(f"seeds {', '.join(map(str, seeds))}")
        return "; ".join(parts)


def _this_python_first() -> dict[str, str]:
    """Returns the environment in which ``python`` and ``pipesync`` are those that run this."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, "PATH": path}


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
