"""The command ``python -m tests.drill``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_pipesync.core.extras import check_extra, missing_extra
from lightning_pipesync.core.names import did_you_mean
from lightning_pipesync.training.registry import METHODS

if TYPE_CHECKING:
    from tests.drill.case import Case


@dataclass(frozen=True)
class Drill:
    """Injects faults into small trainings: each must survive, or fail naming the culprit, and resume.

    Real processes train on this machine, with all methods, in plain loops and in each framework. Each fault proves that
    it has happened. A drill that was broken off goes on where it was, if it gets the same options. The exit status is 1
    if a training has failed, or a fault has not happened.

    Attributes:
        faults: Number of trainings that are struck.
        seed: Of the schedule.
        replay: Drill the training with this seed alone, as in the column seed of the table.
        methods: Whose trainings are struck; all if not given.
        frameworks: plain, lightning, fabric and accelerate; all if not given.
        kinds: Of faults, such as kill, freeze or pause; all if not given.
        subjects: ranks, of one job, and jobs, whose replicas come and go; both if not given and torchft is installed.
        timeout_s: Seconds after which a rank counts as lost, of the methods and of the default process group.
        jobs: Trainings at a time; half as many as there are processors if not given.
        out: Folder for drill.json, drill.md, and a record of each training.
    """

    faults: int = 100
    seed: int = 0
    replay: int | None = None
    methods: tuple[str, ...] = ()
    frameworks: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    subjects: tuple[str, ...] = ()
    timeout_s: float = 10.0
    jobs: int | None = None
    out: Path = Path("outputs/drill")

    def run(self) -> int:
        """Drills, writes the results, and prints them."""
        if not sys.platform.startswith("linux"):
            raise RuntimeError(f"A drill stops and inherits processes as Linux can; this is {sys.platform}.")
        cases = self._cases()  # checks the options
        # Imported here because they are slow to import.
        from tests.drill.report import report
        from tests.drill.supervisor import Place
        from tests.drill.verdict import FAILED, NOT_FIRED

        place = Place(self.out.absolute(), self.timeout_s)
        if self.replay is not None:
            place.record_of(cases[0]).unlink(missing_ok=True)
        self._check_earlier(place.folder)
        left = [case for case in cases if not place.record_of(case).exists()]
        for number, _ in enumerate(self._run_server(left), 1):
            print(f"\r{number} of {len(left)} trainings", end="", file=sys.stderr, flush=True)
        records = [json.loads(place.record_of(case).read_text()) for case in cases]
        if self.replay is not None:
            print(json.dumps(records[0], indent=1))
        else:
            report(records, self.out)
            print(f"\nIn {self.out}: drill.json, drill.md. One again: python -m tests.drill --replay SEED")
        return int(any(record["verdict"] in (FAILED, NOT_FIRED) for record in records))

    def _cases(self) -> list[Case]:
        from tests.drill.case import FRAMEWORKS, draw, frameworks_of, methods, schedule
        from tests.drill.faults import FAULTS, JOBS, SUBJECTS

        for name, value in (("faults", self.faults), ("timeout_s", self.timeout_s), ("jobs", self.jobs)):
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value}.")
        chosen = _chosen("methods", self.methods, methods())
        kinds = _chosen("kinds", self.kinds, list(FAULTS))
        frameworks = _chosen("frameworks", self.frameworks, FRAMEWORKS)
        possible = [name for name in SUBJECTS if name != JOBS or not missing_extra("torchft", name)]
        subjects = _chosen("subjects", self.subjects, list(SUBJECTS)) if self.subjects else possible
        cases = [] if self.replay is None else [draw(self.replay)]
        if JOBS in self.subjects or any(case.subject == JOBS for case in cases):
            check_extra("torchft", f"a drill with subjects={JOBS}")
        pairs = ((method, subject) for method in chosen for subject in subjects)
        if not any(set(frameworks).intersection(frameworks_of(*pair)) for pair in pairs):
            raise ValueError(
                f"frameworks={', '.join(frameworks)} do not have methods={', '.join(chosen)} with "
                f"subjects={', '.join(subjects)}: add plain."
            )
        if not any(subject in FAULTS[kind].subjects for subject in subjects for kind in kinds):
            raise ValueError(f"kinds={', '.join(kinds)} do not strike subjects={', '.join(subjects)}: choose others.")
        return cases or schedule(self.seed, self.faults, chosen, frameworks, kinds, subjects)

    def _check_earlier(self, folder: Path) -> None:
        """Raises a ValueError if the folder has records of a drill with another timeout or other methods."""
        file = folder / "options.json"
        options = {"timeout_s": self.timeout_s, "registered": sorted(METHODS)}
        if file.exists() and (earlier := json.loads(file.read_text())) != options:
            raise ValueError(
                f"out={str(self.out)!r} has a drill with {earlier}, this one has {options}: choose another folder, or "
                "remove that one."
            )
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(options))

    def _run_server(self, cases: Sequence[Case]) -> Iterator[int]:
        """Yields the seed of each case that has ended."""
        if not cases:
            return
        own = [METHODS[case.method].__module__ for case in cases]
        order = {
            "folder": str(self.out.absolute()),
            "timeout_s": self.timeout_s,
            "jobs": self.jobs or max(1, len(os.sched_getaffinity(0)) // 2),
            "imports": sorted({name for name in own if not name.startswith("lightning_pipesync.")}),
            "cases": [case.to_json() for case in cases],
        }
        command = [sys.executable, "-m", "tests.drill.server"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdin is not None
            assert server.stdout is not None
            try:
                server.stdin.write(json.dumps(order))
                server.stdin.close()
                yield from map(int, server.stdout)
            finally:
                if server.poll() is None:
                    server.terminate()
        if server.returncode:
            raise RuntimeError(f"The drill has ended with status {server.returncode}; its output says why.")


def _chosen(option: str, names: Sequence[str], known: Sequence[str]) -> Sequence[str]:
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ValueError(f"{option} must be some of {', '.join(known)}, got {name!r}.{hint}")
    return names or known
