"""``python -m benchmarks.sharded``: a step of replicas that FSDP2 shards within hosts, by the method between hosts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from benchmarks import command
from benchmarks.hsdp import ALONE, ReplicasBenchmark
from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.lab.bench.bandwidth import measure_bandwidth
from lightning_pipesync.lab.bench.benchmark import Progress
from lightning_pipesync.lab.bench.candidates import HSDP, time_candidates
from lightning_pipesync.lab.bench.models import EMULATED, BenchModel, build_model, computation_seconds, model_names
from lightning_pipesync.lab.bench.step import gradient_bytes
from lightning_pipesync.lab.bench.tables import table_of
from lightning_pipesync.lab.bench.timing import median_and_quartiles
from lightning_pipesync.lab.plan.model import device_mesh


@dataclass(frozen=True, kw_only=True)
class Sharded(ReplicasBenchmark):
    """Times a training step of replicas that FSDP2 shards within hosts, with methods between hosts, beside HSDP.

    Start a rank for each device, with torchrun; on emulated hosts by ``pipesync netlab``.

    Attributes:
        model: emulated-alexnet, emulated-resnet50, emulated-bert-base or emulated-bert-large, whose layers sleep.
        scale: Number of values in each tensor over the true number.
        ratio: Time of the communication between hosts over computation time.
        steps: Steps of one measurement; of local SGD whole periods.
        rounds: Number of measurements of each candidate, in turns.
    """

    model: str = "emulated-resnet50"
    scale: float = 0.1
    ratio: tuple[float, ...] = (1.0,)
    steps: int = 3
    rounds: int = 5

    name = "sharded"

    def __post_init__(self) -> None:
        if not self.model.startswith(EMULATED):
            raise ValueError(f"model={self.model!r} must be an emulated one of {', '.join(model_names())}.")
        self._check_positive("scale", "steps", "rounds")
        self._check_all_positive("ratio", self.ratio, "numbers")
        super().__post_init__()

    @property
    def num_measurements(self) -> int:
        return len(self.ratio) * (self.rounds + 1) * self.num_candidates

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Times a step of every candidate, in turns, for each ratio; a collective call.

        Raises:
            ValueError: the ranks do not form two or more replicas.
        """
        mesh, bandwidth = device_mesh(self.ranks_per_replica), measure_bandwidth()
        runs = [self._measure_run(ratio, mesh, bandwidth, progress) for ratio in self.ratio]
        return {"settings": self.settings(), "replicas": mesh["replicas"].size(), "bandwidth": bandwidth, "runs": runs}

    def _measure_run(self, ratio: float, mesh: DeviceMesh, bandwidth: float, progress: Progress) -> dict[str, Any]:
        build: Callable[..., BenchModel] = partial(build_model, self.model, scale=self.scale)
        num_bytes = gradient_bytes(build())
        forward, backward = computation_seconds(num_bytes, mesh["replicas"].size(), bandwidth, ratio)
        build = partial(build, forward_seconds=forward, backward_seconds=backward)
        candidates = [make(build()) for make in self.makers(mesh)]
        for candidate in candidates:
            candidate.prepare()
        timed = time_candidates(candidates, self.steps, self.rounds, lambda name: progress(f"ratio {ratio:g}: {name}"))
        seconds = {name: measured.seconds for name, measured in timed.items()}
        return {"ratio": ratio, "num_bytes": num_bytes, "compute": forward + backward, "seconds": seconds}

    def report(self, results: list[dict[str, Any]]) -> str:
        return "\n".join(part for result in results for run in result["runs"] for part in _part(result, run))

    def draw(self, results: list[dict[str, Any]]) -> None:
        """There is no picture."""


@dataclass(frozen=True)
class _Row:
    """A candidate; medians, in seconds."""

    name: str
    seconds: float
    quartiles: tuple[float, float]
    over_hsdp: float
    of_alone: float  # the time without communication between hosts, over this one


def _rows_of(run: dict[str, Any]) -> list[_Row]:
    timed = {name: median_and_quartiles(seconds) for name, seconds in run["seconds"].items()}
    alone, hsdp = timed[ALONE][0], timed[HSDP][0]
    return [
        _Row(name, median, (first, third), hsdp / median, alone / median)
        for name, (median, first, third) in timed.items()
    ]


def _part(result: dict[str, Any], run: dict[str, Any]) -> list[str]:
    settings = result["settings"]
    heading = (
        f"### {result['replicas']} replicas of {settings['ranks_per_replica']} ranks, communication {run['ratio']:g} "
        f"times computation\n\n{settings['model']}, {run['num_bytes'] / MIB:.1f} MiB of gradients, "
        f"{1e3 * run['compute']:.0f} ms of computation; plain TCP between hosts reaches "
        f"{result['bandwidth'] * 8 / 1e6:.0f} Mbit/s.\n"
    )
    columns = {
        "": lambda row: row.name,
        "ms": lambda row: f"{row.seconds * 1e3:.0f}",
        "quartiles": lambda row: "-".join(f"{value * 1e3:.0f}" for value in row.quartiles),
        "x HSDP": lambda row: f"{row.over_hsdp:.2f}",
        "of no communication": lambda row: f"{row.of_alone:.0%}",
    }
    return [heading, table_of(_rows_of(run), columns)]


if __name__ == "__main__":
    sys.exit(command.main("benchmarks.sharded:Sharded"))
