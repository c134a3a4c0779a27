"""``pipesync bench sharded``: a step of replicas that FSDP2 shards within hosts, by the method between hosts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.lab.bench.bandwidth import measure_bandwidth
from lightning_pipesync.lab.bench.benchmark import Benchmark, Progress
from lightning_pipesync.lab.bench.candidate import Candidate, time_candidates
from lightning_pipesync.lab.bench.candidates import Wrapped, sharded
from lightning_pipesync.lab.bench.method_candidate import method_candidates
from lightning_pipesync.lab.bench.models import EMULATED, BenchModel, build_model, computation_seconds, model_names
from lightning_pipesync.lab.bench.pictures import looks_of, picture
from lightning_pipesync.lab.bench.round_robin import median_and_quartiles
from lightning_pipesync.lab.bench.step import gradient_bytes
from lightning_pipesync.lab.bench.tables import table_of

HSDP, ALONE = "FSDP2 on both (HSDP)", "no communication between hosts"


@dataclass(frozen=True, kw_only=True)
class Sharded(Benchmark):
    """Times a training step of replicas that FSDP2 shards within hosts, with methods between hosts, beside HSDP.

    Start a rank for each device, with torchrun; on emulated hosts by ``pipesync netlab``.

    Attributes:
        model: emulated-alexnet, emulated-resnet50, emulated-bert-base or emulated-bert-large, whose layers sleep.
        scale: Number of values in each tensor over the true number.
        ranks_per_replica: Neighboring ranks among which FSDP2 shards a replica: those of a host.
        methods: What is compared with FSDP2 on a mesh of both dimensions: methods, each with settings if need be, as
            in ``bench step``.
        ratio: Time of the communication between hosts over computation time.
        bucket_mb: Bucket sizes in MiB of methods whose settings choose none.
        steps: Steps of one measurement; of local SGD whole periods.
        rounds: Number of measurements of each candidate, in turns.
    """

    model: str = "emulated-resnet50"
    scale: float = 0.1
    ranks_per_replica: int = 2
    methods: tuple[str, ...]
    ratio: tuple[float, ...] = (1.0,)
    bucket_mb: tuple[float, ...] = (2.0,)
    steps: int = 3
    rounds: int = 5

    name = "sharded"

    def __post_init__(self) -> None:
        if self.model not in model_names() or not self.model.startswith(EMULATED):
            raise ValueError(f"model={self.model!r} must be an emulated one of {', '.join(model_names())}.")
        if self.ranks_per_replica < 2:
            raise ValueError(f"ranks_per_replica must be at least 2, got {self.ranks_per_replica!r}.")
        self._check_positive("scale", "steps", "rounds")
        self._check_all_positive("ratio", self.ratio, "numbers")
        self._check_all_positive("bucket_mb", self.bucket_mb, "numbers of MiB")
        for method in self.methods:  # raises if one is unknown
            method_candidates(method, self.bucket_mb)
        super().__post_init__()

    @property
    def num_measurements(self) -> int:
        num_candidates = 2 + sum(len(method_candidates(method, self.bucket_mb)) for method in self.methods)
        return len(self.ratio) * (self.rounds + 1) * num_candidates

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Times a step of every candidate, in turns, for each ratio; a collective call.

        Raises:
            ValueError: the ranks do not form two or more replicas.
        """
        replicas, rest = divmod(dist.get_world_size(), self.ranks_per_replica)
        if rest or replicas < 2:
            raise ValueError(
                f"ranks_per_replica={self.ranks_per_replica} does not divide {dist.get_world_size()} ranks into two or "
                "more replicas: start a rank for each device with torchrun."
            )
        mesh = init_device_mesh("cpu", (replicas, self.ranks_per_replica), mesh_dim_names=("replicas", "shards"))
        bandwidth = measure_bandwidth()
        runs = [self._measure_run(ratio, mesh, bandwidth, progress) for ratio in self.ratio]
        return {"settings": self.settings(), "replicas": replicas, "bandwidth": bandwidth, "runs": runs}

    def _measure_run(self, ratio: float, mesh: DeviceMesh, bandwidth: float, progress: Progress) -> dict[str, Any]:
        build: Callable[..., BenchModel] = partial(build_model, self.model, scale=self.scale)
        num_bytes = gradient_bytes(build())
        forward, backward = computation_seconds(num_bytes, mesh["replicas"].size(), bandwidth, ratio)
        build = partial(build, forward_seconds=forward, backward_seconds=backward)
        torch.manual_seed(0)
        candidates: list[Candidate] = [_in_fsdp2(ALONE, build(), mesh["shards"]), _in_fsdp2(HSDP, build(), mesh)]
        for method in self.methods:
            for make in method_candidates(method, self.bucket_mb, replicas=mesh["replicas"]):
                candidates.append(make(sharded(build(), mesh["shards"])))
        for candidate in candidates:
            candidate.prepare()
        timed = time_candidates(candidates, self.steps, self.rounds, lambda name: progress(f"ratio {ratio:g}: {name}"))
        seconds = {name: measured.seconds for name, measured in timed.items()}
        return {"ratio": ratio, "num_bytes": num_bytes, "compute": forward + backward, "seconds": seconds}

    def report(self, results: list[dict[str, Any]]) -> str:
        return "\n".join(part for result in results for run in result["runs"] for part in _part(result, run))

    def draw(self, results: list[dict[str, Any]]) -> None:
        with picture(self.output / "sharded.png", (5 * len(results), 4.5), columns=len(results)) as panels:
            for panel, result in zip(panels[0], results, strict=True):
                ratios = [run["ratio"] for run in result["runs"]]
                by_run = [{row.name: row for row in _rows_of(run)} for run in result["runs"]]
                for name, look in looks_of([name for name in by_run[0] if name not in (HSDP, ALONE)]).items():
                    panel.plot(ratios, [rows[name].over_hsdp for rows in by_run], markersize=4, label=name, **look)
                panel.plot(ratios, [rows[ALONE].over_hsdp for rows in by_run], "-.k", label=ALONE)
                panel.axhline(1.0, color="gray", linewidth=0.8)
                panel.set(xlabel="communication / computation", ylabel="times as fast as HSDP", xticks=ratios)
                panel.legend()


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


def _in_fsdp2(name: str, model: BenchModel, mesh: DeviceMesh) -> Wrapped:
    return Wrapped(name, model, sharded(model, mesh).module, "compute")
