"""``python -m benchmarks.goodput``: the steps of replicas that are killed, beside torchft's DiLoCo and DDP."""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks import command
from benchmarks.churn.job import Job, Ranks, Replicas
from benchmarks.churn.log import Line, progress, read, rounds_of, steps_at
from benchmarks.churn.replica import KINDS
from benchmarks.intervals import number
from lightning_pipesync.core.extras import check_extra
from lightning_pipesync.lab.bench.benchmark import Command, progress_bar
from lightning_pipesync.lab.bench.pictures import looks_of, picture
from lightning_pipesync.lab.bench.tables import environment, table
from lightning_pipesync.launch.lighthouse import Lighthouse

#: Seconds between two looks at what has ended.
POLL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Goodput(Command):
    """Trains replicas on this machine of which one after the other is killed: the share of their time that counts.

    Attributes:
        methods: What is compared: local_sgd, torchft DiLoCo, ddp.
        replicas: Number of replicas, or ranks of DDP.
        mib: MiB of the model's fp32 parameters.
        step_ms: Computation of a step, in milliseconds; its layers sleep.
        period: Steps of a round.
        checkpoint_steps: Steps between two checkpoints of DDP, from which torchrun starts again.
        kill_every_s: Seconds between two kills.
        duration_s: Seconds of each method, from the first round of all replicas on.
        heartbeat_timeout_s: Of the lighthouses: seconds without a sign of life after which a replica counts as lost.
        timeout_s: Seconds that a replica waits for the others.
        seed: Of the order in which replicas are killed, the same for all methods.
    """

    methods: tuple[str, ...] = tuple(KINDS)
    replicas: int = 4
    mib: float = 4.0
    step_ms: float = 100.0
    period: int = 30
    checkpoint_steps: int = 100
    kill_every_s: float = 30.0
    duration_s: float = 240.0
    heartbeat_timeout_s: float = 5.0
    timeout_s: float = 120.0
    seed: int = 0

    name = "goodput"

    def __post_init__(self) -> None:
        for method in self.methods:
            if method not in KINDS:
                raise ValueError(f"methods: {method!r} is not known; there are {', '.join(KINDS)}.")
        self._check_positive("replicas", "mib", "step_ms", "period", "checkpoint_steps", "kill_every_s")
        self._check_positive("duration_s", "heartbeat_timeout_s", "timeout_s")
        if self.duration_s < 2 * self.kill_every_s:
            raise ValueError(
                f"duration_s={self.duration_s:g} must be at least twice kill_every_s={self.kill_every_s:g}: the last "
                "kill is so long before the end."
            )

    def results(self) -> list[dict[str, Any]]:
        """Trains by each method.

        Returns:
            Settings, and ``runs``: by method the steps of all replicas that count over time, in seconds, the kills, the
            seconds until a replica that was killed takes a step again, and the exits of all processes.

        Raises:
            RuntimeError: the replicas do not begin within ``timeout_s``, or a kill has not ended its process; the
                message quotes their last lines.
        """
        check_extra("torchft", "python -m benchmarks.goodput")
        runs = []
        with progress_bar(f"{self.replicas} replicas", len(self.methods)) as advance:
            for method in self.methods:
                runs.append({"method": method, **self._run(method)})
                advance(method)
        return [{"settings": self.settings(), "runs": runs, "environment": environment()}]

    def _run(self, method: str) -> dict[str, Any]:
        with self._job(method) as job:
            self._until(job, lambda: all(map(rounds_of, map(read, job.logs))), "have not completed a round")
            begin = time.monotonic()
            for count, replica in enumerate(self._victims(), start=1):
                self._train(job, begin + count * self.kill_every_s)
                self._until(job, lambda replica=replica: job.kill(replica), f"do not have replica {replica}")  # type: ignore[misc]
            self._train(job, begin + self.duration_s)
        logs = [read(path) for path in job.logs]
        if missing := {kill.pid for kill in job.kills} - job.proven():
            raise RuntimeError(f"{method}: SIGKILL has not ended the processes {missing}.\n{job.said()}")
        return {
            "points": progress(logs, begin, begin + self.duration_s),
            "kills": [{"time": kill.time - begin, "replica": kill.replica} for kill in job.kills],
            "back": [_back(logs[kill.replica], kill.time) for kill in job.kills],
            "job": job.as_json(),
        }

    @contextmanager
    def _job(self, method: str) -> Iterator[Job]:
        """Gives the replicas, which run, and ends them after the block; their logs stay."""
        folder = self.output / "goodput" / method.replace(" ", "_")
        shutil.rmtree(folder, ignore_errors=True)
        names = ("mib", "period", "checkpoint_steps", "timeout_s")
        shared = {name: getattr(self, name) for name in names}
        settings = json.dumps({"kind": method, "step_s": self.step_ms / 1e3, **shared})
        with Lighthouse(0, "127.0.0.1", heartbeat_timeout_s=self.heartbeat_timeout_s).serving() as port:
            job: Job = Ranks(folder, self.replicas, settings)
            if method != "ddp":
                job = Replicas(folder, self.replicas, settings, f"127.0.0.1:{port}")
            try:
                job.start()
                yield job
            finally:
                job.end()

    def _victims(self) -> Iterator[int]:
        """Yields the replica of each kill: all in random order, and again."""
        draw, left = random.Random(self.seed), int(self.duration_s / self.kill_every_s) - 1
        while left > 0:
            order = draw.sample(range(self.replicas), self.replicas)[:left]
            yield from order
            left -= len(order)

    def _until(self, job: Job, condition: Callable[[], bool], problem: str) -> None:
        deadline = time.monotonic() + self.timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise RuntimeError(f"After timeout_s={self.timeout_s:g} the replicas {problem}.\n{job.said()}")
            self._train(job, time.monotonic() + POLL_S)

    def _train(self, job: Job, end: float) -> None:
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, POLL_S))
            job.poll()

    def goodput(self, run: dict[str, Any]) -> float:
        """Returns the share of all replicas' time in which they computed steps that count."""
        steps: int = run["points"][-1][1]
        return steps * self.step_ms / 1e3 / (self.replicas * self.duration_s)

    def report(self, results: list[dict[str, Any]]) -> str:
        return "\n".join(self._table(result) for result in results)

    def _table(self, result: dict[str, Any]) -> str:
        rows = []
        for run in result["runs"]:
            back = [seconds for seconds in run["back"] if seconds is not None]
            rows.append(
                [
                    run["method"],
                    f"{len(run['kills'])}",
                    f"{run['points'][-1][1]}",
                    f"{self.goodput(run):.1%}",
                    number(median(back) if back else None, ".1f"),
                ]
            )
        headings = ["", "kills", "steps that count", "goodput", "seconds until a step after a kill"]
        return f"""### {self.replicas} replicas, a kill each {self.kill_every_s:g} s

A step computes {self.step_ms:g} ms, a round has {self.period} steps, and DDP saves a checkpoint each
{self.checkpoint_steps}. The steps are those of {self.duration_s:g} s that are in a round, or that DDP has not repeated.
Goodput is their computation, of the time of all replicas; starting counts as lost, and so does waiting.

{table(headings, rows)}"""

    def draw(self, results: list[dict[str, Any]]) -> None:
        """Draws the steps of a replica over time, and the kills."""
        result = results[-1]
        with picture(self.output / "goodput.png", (8, 4.5), legend="panel") as [[panel]]:
            limit = self.duration_s * 1e3 / self.step_ms
            panel.plot([0, self.duration_s], [0, limit], color="grey", linewidth=0.8, label="never waits")
            looks = looks_of(run["method"] for run in result["runs"])
            for run in result["runs"]:
                look = {**looks[run["method"]], "marker": None}
                times, steps = zip(*run["points"], strict=True)
                panel.step(times, [value / self.replicas for value in steps], where="post", label=run["method"], **look)
                kills = [kill["time"] for kill in run["kills"]]
                heights = [steps_at(run["points"], kill) / self.replicas for kill in kills]
                panel.scatter(kills, heights, marker="x", color=look["color"], zorder=3)
            panel.scatter([], [], marker="x", color="grey", label="a replica is killed")
            panel.set_xlabel("seconds")
            panel.set_ylabel("steps of a replica that count")


def _back(lines: list[Line], killed: float) -> float | None:
    """Returns the seconds from a kill to the replica's first step in another process; None if there is none."""
    pids = {line.pid for line in lines if line.time <= killed}
    later = [line.time for line in lines if line.event == "step" and line.pid not in pids]
    return min(later) - killed if later else None


if __name__ == "__main__":
    sys.exit(command.main("benchmarks.goodput:Goodput"))
