"""``python -m benchmarks.converge``: ``pipesync bench converge`` on emulated hosts of different speed.

Its pictures of the error and of the staleness are those of the lecture on parameter servers.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

import benchmarks.baselines  # adds what trains tasks
import benchmarks.tasks.mnist1d
import benchmarks.tasks.signals
import benchmarks.tasks.tiny_llama
import benchmarks.tasks.topics_muon  # noqa: F401 - they add themselves to the tasks
from benchmarks import command
from benchmarks.learners import host_speed_report
from benchmarks.learners.host_speed import HostSpeeds
from benchmarks.learners.passes import Passes
from lightning_pipesync.lab.bench import converge
from lightning_pipesync.lab.bench.benchmark import Progress
from lightning_pipesync.lab.bench.job import launched
from lightning_pipesync.lab.bench.training import Training


@dataclass(frozen=True, kw_only=True)
class Converge(converge.Converge):
    """Trains to a target with several methods, on hosts of different speed: time, steps and bytes that each needs.

    Attributes:
        task: Those of pipesync bench converge, mnist1d (digits as signals, accuracy), signals (noisy curves,
            accuracy), tiny_llama (topics with a Llama, perplexity) or topics_muon (topics with Muon).
        methods: Those of pipesync bench converge, and ddp_powersgd, torch's own PowerSGD under DDP (:rank=4,start=2).
        compute: Emulated computation: the least time of each pass of a rank, e.g. 100ms; it sleeps for the rest.
        slow: HOST:SHARE% for a rank that computes at that share of the speed (3:50%). May be given again.
        stalls: SHARE%:FACTOR for passes that stall at random (5%:10): that share of them takes longer, by an
            exponentially distributed time with a mean of so many times --compute.
    """

    compute: str | None = None
    slow: list[str] = field(default_factory=list)
    stalls: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for count in () if launched() else self.hosts:
            self.host_speeds.check_hosts(count)

    @property
    def host_speeds(self) -> HostSpeeds:
        """How long the computation of a step takes on each host."""
        return HostSpeeds.parse(self.compute, self.slow, self.stalls)

    def prepare(self, training: Training, seed: int) -> None:
        training.candidate.run_passes = Passes(self.host_speeds.seconds_of(dist.get_rank(), seed)).run

    def measure(self, progress: Progress) -> dict[str, Any]:
        self.host_speeds.check_hosts(dist.get_world_size())
        return super().measure(progress)

    def report(self, results: list[dict[str, Any]]) -> str:
        tables = [super().report(results)]
        if self.compute is not None:
            tables += [host_speed_report.as_markdown(result, converge.config_of) for result in results]
        return "\n".join(tables)

    def draw(self, results: list[dict[str, Any]]) -> None:
        super().draw(results)
        for result in results:
            host_speed_report.draw_errors(result, self.output / f"errors_{result['world_size']}.png")
            host_speed_report.draw_staleness(result, self.output / f"staleness_{result['world_size']}.png")


if __name__ == "__main__":
    sys.exit(command.main("benchmarks.converge:Converge"))
