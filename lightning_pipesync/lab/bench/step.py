"""``pipesync bench step``: a training step by method, compared with the limits (DeAR, Figs. 7 and 8; Eqs. 6-8)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.core.cost import LinkCost
from lightning_pipesync.core.names import did_you_mean
from lightning_pipesync.lab.bench.bandwidth import measure_bandwidth
from lightning_pipesync.lab.bench.benchmark import Benchmark, Progress
from lightning_pipesync.lab.bench.candidates import (
    ALONE,
    compared,
    ddp_name,
    makers,
    time_candidates,
    without_communication,
)
from lightning_pipesync.lab.bench.models import (
    EMULATED,
    BenchModel,
    build_model,
    computation_seconds,
    model_names,
)
from lightning_pipesync.lab.bench.pictures import looks_of, picture
from lightning_pipesync.lab.bench.tables import table_of
from lightning_pipesync.lab.bench.timing import median_and_quartiles, profile_step, time_round_robin
from lightning_pipesync.lab.predictions.limits import StepCost
from lightning_pipesync.lab.predictions.work import Profile, predict_ddp

#: Sizes in MiB of the all-reduces from which alpha and beta are fitted.
LINK_MB = (0.25, 1.0, 4.0)


@dataclass(frozen=True, kw_only=True)
class StepBenchmark(Benchmark):
    """A benchmark of training steps with several methods.

    Attributes:
        model: transformer, cnn, resnet50 or bert-base; or emulated-alexnet, emulated-resnet50, emulated-bert-base or
            emulated-bert-large, whose layers sleep.
        scale: Number of values in each tensor of an emulated model over the true number.
    """

    model: str = "emulated-resnet50"
    scale: float = 0.1
    methods: tuple[str, ...]
    bucket_mb: tuple[float, ...]
    steps: int

    def __post_init__(self) -> None:
        if self.model not in model_names():
            hint = did_you_mean(self.model, model_names())
            raise ValueError(f"model={self.model!r} is not known; there are {', '.join(model_names())}.{hint}")
        self._check_positive("scale", "steps")
        self._check_all_positive("bucket_mb", self.bucket_mb, "numbers of MiB")
        if not makers(self.methods, self.bucket_mb):  # which raises if one is unknown
            raise ValueError("methods must name something to compare.")
        super().__post_init__()

    def emulated_builder(self, ratio: float, bandwidth: float) -> Callable[[], BenchModel]:
        """Returns a factory of the emulated model, with the duration of computation of a ratio."""
        build = partial(build_model, self.model, scale=self.scale)
        forward, backward = computation_seconds(gradient_bytes(build()), dist.get_world_size(), bandwidth, ratio)
        return partial(build, forward_seconds=forward, backward_seconds=backward)


@dataclass(frozen=True, kw_only=True)
class Step(StepBenchmark):
    """Times a training step by method, compared with DDP, FSDP2, ZeRO and the limits of the papers.

    Attributes:
        methods: What is compared: ddp, fsdp2, fsdp2_resharded, zero, and methods of this package, each with settings if
            need be: NAME:SETTING=VALUE,SETTING=VALUE, e.g. dear:overlap=forward, dear:bucket_mb=2, dear:fusion=bo,
            which searches for a bucket size first, in some 100 steps, selsync:overlap=forward or
            pipe_sgd:compression=int8.
        ratio: Communication time over computation time of an emulated model; 1 if not given.
        bucket_mb: Bucket sizes in MiB of DDP, and of SelSync under the forward pass; the baseline is DDP with its best
            size.
        steps: Steps of one measurement; of local SGD whole periods.
        rounds: Number of measurements of each candidate, in turns.
        device: cpu, or cuda, where each rank has the GPU of its place in its host.
        backend: nccl or gloo, for tensors on a GPU. With gloo, which sends them through the host, ranks may share one.
    """

    methods: tuple[str, ...] = field(default_factory=compared)
    ratio: tuple[float, ...] | None = None
    bucket_mb: tuple[float, ...] = (0.5, 2, 25)
    steps: int = 3
    rounds: int = 5
    device: str = "cpu"
    backend: str = "nccl"

    name = "step"

    def __post_init__(self) -> None:
        if "ddp" not in self.methods:
            raise ValueError(f"methods={self.methods!r}: ddp has to be among them, which all others are compared to.")
        if self.ratio is not None:
            if not self.model.startswith(EMULATED):
                raise ValueError(
                    f"ratio={[*self.ratio]} is a setting of emulated models: {self.model} takes the time that it needs."
                )
            if not all(ratio > 0 for ratio in self.ratio):
                raise ValueError(f"ratio must be positive, got {self.ratio!r}.")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device={self.device!r} must be cpu or cuda.")
        if self.backend not in ("nccl", "gloo"):
            raise ValueError(f"backend={self.backend!r} must be nccl or gloo.")
        if self.device == "cuda" and self.model.startswith(EMULATED):
            raise ValueError(f"device='cuda' with model={self.model!r}: its layers sleep on the host; choose another.")
        self._check_positive("rounds")
        super().__post_init__()

    @property
    def ratios(self) -> tuple[float, ...]:
        """Communication time over computation time; none for a model that is not emulated."""
        return (self.ratio or (1.0,)) if self.model.startswith(EMULATED) else ()

    @property
    def num_measurements(self) -> int:
        num_candidates = 1 + len(makers(self.methods, self.bucket_mb))
        return max(1, len(self.ratios)) * (self.rounds + 1) * num_candidates

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Times a step of every candidate, in turns, for each ratio; a collective call.

        In the result ``bandwidth`` is in bytes per second, ``link`` has alpha and beta of the backend's all-reduce, and
        ``runs`` what :meth:`measure_run` returns for each ratio.
        """
        bandwidth, link = measure_bandwidth(), measure_link(self.device)
        runs = [
            self.measure_run(self.emulated_builder(ratio, bandwidth), bandwidth, link, progress, f"ratio {ratio:g}: ")
            for ratio in self.ratios
        ] or [self.measure_run(lambda: build_model(self.model).to(self.device), bandwidth, link, progress)]
        shared = {"settings": self.settings(), "world_size": dist.get_world_size(), "bandwidth": bandwidth}
        return {**shared, "link": asdict(link), "runs": runs}

    def measure_run(
        self, build: Callable[[], BenchModel], bandwidth: float, link: LinkCost, progress: Progress, label: str = ""
    ) -> dict[str, Any]:
        """Times a step of every candidate, in turns; a collective call.

        In the result ``cost`` has the parts of a step, from which the limits follow. A candidate has its seconds per
        step of each round, its ``limit``, the same for the layers of this model, for DDP and Pipe-SGD the seconds that
        the cost model predicts, and the result of its search, if there is one.
        """
        torch.manual_seed(0)  # the same weights on all ranks, which not every candidate broadcasts
        alone = without_communication(build())
        of_methods = {"backend": self.backend} if self.device == "cuda" else {}
        candidates = [alone, *(make(build()) for make in makers(self.methods, self.bucket_mb, **of_methods))]
        world_size, num_bytes = dist.get_world_size(), gradient_bytes(alone.model)
        profile = profile_step(alone)
        cost = cost_of(profile, num_bytes, bandwidth)
        by_name = {candidate.name: candidate for candidate in candidates}
        found = {name: candidate.prepare() for name, candidate in by_name.items()}
        timed = time_candidates(candidates, self.steps, self.rounds, lambda name: progress(label + name))
        predicted = {ddp_name(mib): predict_ddp(profile, link, world_size, mib) for mib in self.bucket_mb}
        measured = []
        for name, candidate in by_name.items():
            if candidate.segments is not None:
                all_reduce = link.all_reduce(num_bytes / candidate.compression, world_size)
                all_reduce += (candidate.segments - 1) * link.all_reduce(0, world_size)
                predicted[name] = max(cost.compute, all_reduce)
            compressed = cost.compressed(candidate.compression)
            measured.append(
                {
                    "name": name,
                    "seconds": timed[name].seconds,
                    "processor_seconds": timed[name].processor_seconds,
                    "limit": getattr(compressed, candidate.limit),
                    "layer_limit": getattr(replace(compressed, tensors=profile.tensors), candidate.limit),
                    "predicted": predicted.get(name),
                    "search": found[name],
                }
            )
        return {"num_bytes": num_bytes, "cost": asdict(cost), "candidates": measured}

    def report(self, results: list[dict[str, Any]]) -> str:
        return as_markdown(results)

    def draw(self, results: list[dict[str, Any]]) -> None:
        draw_speedup(results, self.output / "speedup.png")


def cost_of(profile: Profile, num_bytes: int, bandwidth: float) -> StepCost:
    """Returns the parts of a step, whose halves of an all-reduce take what a ring's bytes alone do."""
    world_size = dist.get_world_size()
    half = (world_size - 1) / world_size * num_bytes / bandwidth
    return StepCost(profile.forward, profile.backward, profile.update, half, half)


def gradient_bytes(model: BenchModel) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.module.parameters())


def measure_link(device: str = "cpu", rounds: int = 5) -> LinkCost:
    """Returns alpha and beta of the backend's all-reduce, which DDP uses; a collective call."""
    buffers = {f"{size}": torch.zeros(round(size * MIB / 4), device=device) for size in LINK_MB}
    timed = time_round_robin({name: partial(dist.all_reduce, buffer) for name, buffer in buffers.items()}, rounds)
    points = [(buffers[name].numel() * 4, value) for name, measured in timed.items() for value in measured.seconds]
    num_bytes, seconds = zip(*points, strict=True)
    return LinkCost.fit(num_bytes, seconds, dist.get_world_size())


@dataclass(frozen=True)
class Row:
    """One candidate in one run; medians, in seconds."""

    name: str
    seconds: float
    quartiles: tuple[float, float]
    #: The speed-up over DDP with its best bucket size.
    over_ddp: float
    #: The limit of this kind of method over its time, in general and for the layers of this model.
    of_limit: float
    of_layer_limit: float
    #: What a step takes beyond the parts of its computation, as profiled.
    exposed: float
    #: T(1) / T(n), where T(1) is the step without communication, in turns with it.
    scaling_efficiency: float
    #: Processor time of a step, all threads of a rank.
    processor: float
    #: The relative error of the cost model; None without a prediction.
    prediction_error: float | None


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}"


#: Narrow enough that a terminal of 80 columns has place for the names; the heading explains them.
COLUMNS = {
    "": lambda row: row.name,
    "ms": lambda row: _ms(row.seconds),
    "quartiles": lambda row: "-".join(map(_ms, row.quartiles)),
    "x DDP": lambda row: f"{row.over_ddp:.2f}",
    "limit": lambda row: f"{row.of_limit:.0%}",
    "layers": lambda row: f"{row.of_layer_limit:.0%}",
    "T1/Tn": lambda row: f"{row.scaling_efficiency:.0%}",
    "CPU": lambda row: _ms(row.processor),
    "model": lambda row: "" if row.prediction_error is None else f"{row.prediction_error:+.0%}",
}


def rows_of(run: dict[str, Any]) -> list[Row]:
    """Returns a row for each candidate of one ratio, compared with DDP at its best bucket size."""
    cost = StepCost(**run["cost"])
    timed = {measured["name"]: median_and_quartiles(measured["seconds"]) for measured in run["candidates"]}
    best_ddp = min(median for name, (median, _, _) in timed.items() if name.startswith("DDP, "))
    rows = []
    for measured in run["candidates"]:
        median, low, high = timed[measured["name"]]
        rows.append(
            Row(
                name=measured["name"],
                seconds=median,
                quartiles=(low, high),
                over_ddp=best_ddp / median,
                of_limit=measured["limit"] / median,
                of_layer_limit=measured["layer_limit"] / median,
                exposed=max(0.0, median - cost.compute),
                scaling_efficiency=timed[ALONE][0] / median,
                processor=median_and_quartiles(measured["processor_seconds"])[0],
                prediction_error=None if measured["predicted"] is None else measured["predicted"] / median - 1,
            )
        )
    return rows


def as_markdown(results: list[dict[str, Any]]) -> str:
    """Returns a table for each number of hosts and each ratio."""
    parts = []
    for result in results:
        for run in result["runs"]:
            parts += [_heading(result, run), table_of(rows_of(run), COLUMNS)]
            parts += [_search(searched) for searched in run["candidates"] if searched["search"]]
    return "\n".join(parts)


def _heading(result: dict[str, Any], run: dict[str, Any]) -> str:
    world_size, cost = result["world_size"], StepCost(**run["cost"])
    model, mib, mbit = result["settings"]["model"], run["num_bytes"] / MIB, result["bandwidth"] * 8 / 1e6
    halves, pipe = cost.two_halves, cost.under_next_step
    return f"""### {world_size} hosts, communication {cost.ratio:.2g} times computation

{model}, {mib:.1f} MiB of gradients; plain TCP reaches {mbit:.0f} Mbit/s.
Computation: forward {_ms(cost.forward)}, backward {_ms(cost.backward)}, update {_ms(cost.update)} ms.
An all-reduce takes at least {_ms(cost.all_reduce)} ms. So a step takes at least {_ms(cost.baseline)} ms with the
all-reduce under backward (Eq. 8), {_ms(halves)} with the paper's DeAR (Eq. 7), {_ms(cost.eager)} with gathers under
backward, too, {_ms(pipe)} with Pipe-SGD, which
may need twice as many (its convergence bound, 8 F L sqrt((k + 1) / T)): {_ms(2 * pipe)} ms.
The largest possible speed-up over one host (Eq. 6) is {cost.max_speedup(world_size):.2f}.

Columns: the median of a step in **ms** and its **quartiles**; how many times as fast it is as DDP with its best bucket
size (**x DDP**); the share of the **limit** of its kind of method that it reaches, and of the limit for the **layers**
of this model; its scaling efficiency (**T1/Tn**); processor time of all threads of a rank in ms (**CPU**); the error of
the cost **model**. T(n) is the time of a step on n hosts, T(1) that of the step without communication, with the same
mini-batch on each host: communication overhead = T(n) - T(1), speed-up = n T(1) / T(n).
"""


def _search(candidate: dict[str, Any]) -> str:
    found, (seconds, _, _) = candidate["search"], median_and_quartiles(candidate["seconds"])
    lost = found["seconds"] / seconds - found["steps"]
    tried = f"{found['trials']} sizes tried in " if found["trials"] else ""
    return (
        f"{candidate['name']}: {tried}{found['steps']} steps, which took as long as {lost:.1f} steps more; found "
        f"{found['size']:.2g} MiB, {found['edge'] or found['size']:.2g} at the ends.\n"
    )


def draw_speedup(results: list[dict[str, Any]], path: Path) -> None:
    """Draws the speed-up over DDP by the ratio of communication to computation, with the limits."""
    with picture(path, (5 * len(results), 4.5), columns=len(results), legend="panel", sharey=True) as panels:
        for panel, result in zip(panels[0], results, strict=True):
            costs = [StepCost(**run["cost"]) for run in result["runs"]]
            ratios = [cost.ratio for cost in costs]
            by_run = [{row.name: row for row in rows_of(run)} for run in result["runs"]]
            shown = [name for name in by_run[0] if not name.startswith("DDP, ") and name != ALONE]
            for name, look in looks_of(shown).items():
                panel.plot(ratios, [rows[name].over_ddp for rows in by_run], markersize=4, label=name, **look)
            limits = [cost.baseline / cost.two_halves for cost in costs]
            panel.plot(ratios, limits, ":k", label="limit of DeAR (Eqs. 7, 8)")
            panel.plot(ratios, [cost.baseline / cost.eager for cost in costs], "--k", label="limit of eager gathers")
            panel.plot(ratios, [cost.baseline / cost.compute for cost in costs], "-.k", label="without communication")
            panel.axhline(1.0, color="gray", linewidth=0.8)
            panel.set(xscale="log", xlabel="communication / computation", ylabel="times as fast as DDP")
            panel.set_title(f"{result['world_size']} hosts")
            panel.set_xticks(ratios, [f"{ratio:.2g}" for ratio in ratios])
            panel.minorticks_off()
            panel.grid(alpha=0.3)
