"""``python -m benchmarks.scaling``: throughput over the number of workers, relative to one (SelSync, Fig. 1a)."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import benchmarks.baselines
import benchmarks.baselines.networks  # noqa: F401 - both add to what can be compared
from benchmarks import command
from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.lab.bench.bandwidth import measure_bandwidth
from lightning_pipesync.lab.bench.benchmark import Progress
from lightning_pipesync.lab.bench.candidates import makers, time_candidates, without_communication
from lightning_pipesync.lab.bench.models import EMULATED, build_model, computation_seconds
from lightning_pipesync.lab.bench.pictures import colour_and_line, picture
from lightning_pipesync.lab.bench.step import StepBenchmark, cost_of, gradient_bytes
from lightning_pipesync.lab.bench.tables import table
from lightning_pipesync.lab.bench.timing import profile_step

#: The name of the step of one worker.
ALONE = "no communication"


@dataclass(frozen=True, kw_only=True)
class Scaling(StepBenchmark):
    """Times the same step on more and more workers, each with a mini-batch of its own, beside the cost model.

    Attributes:
        model: emulated-alexnet, emulated-resnet50, emulated-densenet201, emulated-inceptionv4, emulated-bert-base or
            emulated-bert-large, whose layers sleep.
        ratio: Time in which a link carries the gradient once, over the computation of a step; the same for every number
            of workers.
        methods: ps (a parameter server on the first host), ddp (all-reduces), and others of `python -m
            benchmarks.step`.
        bucket_mb: Bucket size in MiB of DDP.
        steps: Steps of one measurement.
        rounds: Number of measurements of each candidate, in turns.
    """

    hosts: tuple[int, ...] = (2, 4, 8)
    scale: float = 0.03
    methods: tuple[str, ...] = ("ps", "ddp")
    ratio: tuple[float, ...] = (0.05, 0.25, 1.0)
    bucket_mb: tuple[float, ...] = (0.5,)
    steps: int = 2
    rounds: int = 4

    name = "scaling"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model.startswith(EMULATED):
            raise ValueError(f"model={self.model!r} computes: workers on one machine would slow each other down.")
        self._check_all_positive("ratio", self.ratio, "numbers")
        self._check_positive("rounds")

    @property
    def num_measurements(self) -> int:
        return len(self.ratio) * (self.rounds + 1) * (1 + len(makers(self.methods, self.bucket_mb)))

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Times a step of every candidate, in turns, for each ratio; a collective call.

        Returns:
            Settings; ``bandwidth`` in bytes per second; and for each ratio the ``seconds`` of a step of each candidate
            in each round, and the ``limit`` that the cost model has: the exchange with one server hidden under nothing,
            of which 2 N (P - 1) bytes pass its link, and DDP's all-reduce hidden under backward (DeAR, Eq. 8).
        """
        bandwidth = measure_bandwidth()
        runs = [self._measure_run(ratio, bandwidth, progress) for ratio in self.ratio]
        shared = {"settings": self.settings(), "world_size": dist.get_world_size(), "bandwidth": bandwidth}
        return {**shared, "runs": runs}

    def _measure_run(self, ratio: float, bandwidth: float, progress: Progress) -> dict[str, Any]:
        torch.manual_seed(0)
        build = partial(build_model, self.model, scale=self.scale)
        num_bytes = gradient_bytes(build())
        # Two workers send each byte of the gradient once.
        forward, backward = computation_seconds(num_bytes, 2, bandwidth, ratio)
        build = partial(build, forward_seconds=forward, backward_seconds=backward)
        alone = without_communication(build())
        candidates = [alone, *(make(build()) for make in makers(self.methods, self.bucket_mb))]
        profile = profile_step(alone)
        cost = cost_of(profile, num_bytes, bandwidth)
        timed = time_candidates(candidates, self.steps, self.rounds, lambda name: progress(f"ratio {ratio:g}: {name}"))
        limits = {one.name: float(getattr(cost.compressed(one.compression), one.limit)) for one in candidates}
        return {
            "ratio": ratio,
            "num_bytes": num_bytes,
            "seconds": {name: measured.seconds for name, measured in timed.items()},
            "limit": limits,
        }

    def report(self, results: list[dict[str, Any]]) -> str:
        names = [name for name in results[0]["runs"][0]["seconds"] if name != ALONE]
        rows = []
        for number, ratio in enumerate(results[0]["settings"]["ratio"]):
            for result in results:
                run = result["runs"][number]
                cells = [
                    f"{throughput(result, run, name):.2f} ({limit_of_throughput(result, run, name):.2f})"
                    for name in names
                ]
                one = median(run["seconds"][ALONE]) * 1e3
                rows.append([f"{ratio:g}", f"{result['world_size']}", f"{one:.0f}", *cells])
        mib, mbit = results[0]["runs"][0]["num_bytes"] / MIB, results[0]["bandwidth"] * 8 / 1e6
        return f"""### Throughput relative to one worker (Fig. 1a)

{results[0]["settings"]["model"]}, {mib:.1f} MiB of gradients; plain TCP reaches {mbit:.0f} Mbit/s. The ratio is the
time in which a link carries the gradient once over the computation of a step. Samples per second over those of one
worker, each with a mini-batch of its own; in brackets the most that the cost model allows.

{table(["ratio", "workers", "ms of one worker", *names], rows)}"""

    def draw(self, results: list[dict[str, Any]]) -> None:
        """Draws the relative throughput over the number of workers, a panel for each ratio."""
        ratios, counts = results[0]["settings"]["ratio"], [1, *(result["world_size"] for result in results)]
        ticks = [0.5, *counts]
        size = (4.2 * len(ratios), 4)
        shared: dict[str, Any] = {"columns": len(ratios), "legend": "below", "legend_columns": 3}
        with picture(self.output / "scaling.png", size, **shared) as [panels]:
            for number, (panel, ratio) in enumerate(zip(panels, ratios, strict=True)):
                runs = [(result, result["runs"][number]) for result in results]
                for place, name in enumerate(name for name in runs[0][1]["seconds"] if name != ALONE):
                    color = colour_and_line(place)["color"]
                    panel.plot(counts, [1.0, *(throughput(*run, name) for run in runs)], "o-", color=color, label=name)
                    limits = [1.0, *(limit_of_throughput(*run, name) for run in runs)]
                    panel.plot(counts, limits, "--", color=color, label=f"{name}, cost model")
                panel.plot(counts, counts, ":k", label="linear")
                panel.set(xscale="log", yscale="log", xlabel="workers", title=f"communication {ratio:g} of computation")
                panel.set_xticks(counts, map(str, counts))
                panel.set_yticks(ticks, map("{:g}".format, ticks))
                panel.minorticks_off()
                panel.grid(alpha=0.3)
            panels[0].set_ylabel("throughput over that of one worker")


def throughput(result: dict[str, Any], run: dict[str, Any], name: str) -> float:
    """Returns the samples per second of all workers over those of one, of medians."""
    return float(result["world_size"] * median(run["seconds"][ALONE]) / median(run["seconds"][name]))


def limit_of_throughput(result: dict[str, Any], run: dict[str, Any], name: str) -> float:
    """Returns :func:`throughput` as the cost model has it."""
    return float(result["world_size"] * median(run["seconds"][ALONE]) / run["limit"][name])


if __name__ == "__main__":
    sys.exit(command.main("benchmarks.scaling:Scaling"))
