"""``python -m benchmarks.stages``: the throughput of a pipeline by method (EA-Pipe, Tables 2 and 5)."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from benchmarks import command
from benchmarks.named_settings import parse_named, readable
from benchmarks.parts import OF_PARTS, draw_span
from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.lab.bench.bandwidth import measure_bandwidth
from lightning_pipesync.lab.bench.benchmark import Benchmark, Progress
from lightning_pipesync.lab.bench.emulated import EmulatedCompute
from lightning_pipesync.lab.bench.pictures import picture
from lightning_pipesync.lab.bench.tables import table
from lightning_pipesync.methods.ea_pipe import EAPipe, EAPipeConfig
from lightning_pipesync.methods.ea_pipe.config import ALGORITHMS

#: Samples of a mini-batch, a multiple of the number of micro-batches.
BATCH_SIZE = 64

#: The kind, start and end of a pass.
Span = tuple[str, float, float]


@dataclass(frozen=True, kw_only=True)
class Stages(Benchmark):
    """Times the mini-batches of a pipeline in the steady state, compared with GPipe, 1F1B and stages that never wait.

    Attributes:
        hosts: Numbers of hosts, one stage each. Not used if a launcher has started this process.
        methods: What is compared: ea_pipe, pipedream, weight_stashing, naive, spectrain, gpipe or 1f1b, each with
            settings if need be: NAME:SETTING=VALUE,SETTING=VALUE, e.g. ea_pipe:replicas=5 or gpipe:micro_batches=16.
        stage_ms: Computation of a stage for each mini-batch, in milliseconds; a third of it is the forward pass.
        activation_mib: MiB of the activations of a mini-batch between two stages, and of their gradients.
        steps: Mini-batches of one measurement.
        rounds: Number of measurements of each candidate, in turns.
        output: Folder for stages.json, stages.md and stages.png, of the last number of hosts.
    """

    methods: tuple[str, ...] = ("ea_pipe", "pipedream", "gpipe", "1f1b")
    stage_ms: tuple[float, ...] = (100,)
    activation_mib: float = 0.25
    steps: int = 20
    rounds: int = 3

    name = "stages"

    def __post_init__(self) -> None:
        for method in self.methods:
            parse_candidate(method)
        self._check_positive("activation_mib", "steps", "rounds")
        self._check_all_positive("stage_ms", self.stage_ms, "numbers of ms")
        super().__post_init__()

    @property
    def num_measurements(self) -> int:
        return len(self.stage_ms) * self.rounds * len(self.methods)

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Times mini-batches of every candidate in the steady state, in turns; a collective call.

        Returns:
            Settings; bandwidth in bytes per second; and for each of ``stage_ms`` the seconds of a mini-batch in a stage
            that never waits, and by candidate the measured seconds and the processor seconds of a stage, round by
            round, and the ``trace`` of some mini-batches from an empty pipeline to an empty one: for each stage the
            kind, start and end of its passes, in seconds.
        """
        shared = {"settings": self.settings(), "world_size": dist.get_world_size(), "bandwidth": measure_bandwidth()}
        return {**shared, "runs": [self._measure_run(milliseconds / 1e3, progress) for milliseconds in self.stage_ms]}

    def _measure_run(self, stage_seconds: float, progress: Progress) -> dict[str, Any]:
        num_layers = dist.get_world_size()
        width = max(1, round(self.activation_mib * MIB / 4 / BATCH_SIZE))
        batch = torch.ones(BATCH_SIZE, width), torch.zeros(1)
        stages = {name: EmulatedStages(num_layers, stage_seconds) for name in self.methods}
        engines = {
            name: EAPipe(stages[name], _loss, lambda ps: SGD(ps, lr=1e-3), parse_candidate(name))
            for name in self.methods
        }
        seconds = torch.zeros(len(engines), self.rounds, dtype=torch.float64)
        processor = torch.zeros_like(seconds)
        for round_ in range(self.rounds):
            for i, (name, engine) in enumerate(engines.items()):
                for _ in range(3 * num_layers):  # until the steady state
                    engine.train_batch(batch)
                start, processor_start = time.perf_counter(), time.process_time()
                for _ in range(self.steps):
                    engine.train_batch(batch)
                seconds[i, round_] = (time.perf_counter() - start) / self.steps
                processor[i, round_] = (time.process_time() - processor_start) / self.steps
                engine.flush()
                dist.barrier()
                progress(name)
        traces = {name: trace(engine, stages[name], batch) for name, engine in engines.items()}
        for engine in engines.values():
            engine.detach()
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        dist.all_reduce(processor)
        processor /= num_layers
        return {
            "stage_seconds": stage_seconds,
            "candidates": [
                {"name": name, "seconds": wall, "processor_seconds": busy, "trace": traces[name]}
                for name, wall, busy in zip(engines, seconds.tolist(), processor.tolist(), strict=True)
            ],
        }

    def report(self, results: list[dict[str, Any]]) -> str:
        return "\n".join(_table(result, run) for result in results for run in result["runs"])

    def draw(self, results: list[dict[str, Any]]) -> None:
        """Draws a panel per candidate with a row per stage, the first on top, and the numbers of mini-batches."""
        candidates = results[-1]["runs"][0]["candidates"]
        num_stages, path = len(candidates[0]["trace"]), self.output / "stages.png"
        size = (11, 0.6 + (0.6 + 0.35 * num_stages) * len(candidates))
        colours = {kind: OF_PARTS[kind] for kind in ("forward", "backward")}
        with picture(path, size, rows=len(candidates), sharex=True, legend="above", patches=colours) as panels:
            for [panel], candidate in zip(panels, candidates, strict=True):
                for stage, spans in enumerate(candidate["trace"]):
                    parts = len(spans) // (4 * num_stages)  # micro-batches: 2 passes, 2 mini-batches a stage
                    counts = dict.fromkeys(colours, 0)
                    for kind, begin, end in spans:
                        number = counts[kind] // parts
                        counts[kind] += 1
                        draw_span(panel, -stage, begin, end, kind, number)
                        if parts == 1:
                            middle = (begin + end) / 2
                            panel.text(middle, -stage, str(number + 1), ha="center", va="center", fontsize=6)
                panel.set_yticks([-n for n in range(num_stages)], [f"stage {n + 1}" for n in range(num_stages)])
                panel.set_title(readable(candidate["name"]), loc="left", fontsize="medium")
            panels[-1, 0].set_xlabel("seconds")


class EmulatedStages(nn.Sequential):
    """A pipeline whose layers sleep, one per stage, and return activations of the size of their input.

    The time is proportional to the number of samples, as on an accelerator that any number keeps busy.

    Args:
        num_stages: the number of stages.
        stage_seconds: both passes of a mini-batch in a stage; a third of it is the forward pass.

    Attributes:
        spans: the passes in this process, by ``time.perf_counter``.
    """

    def __init__(self, num_stages: int, stage_seconds: float) -> None:
        compute = EmulatedCompute(stage_seconds / 3, stage_seconds * 2 / 3)
        spans: list[Span] = []
        super().__init__(*(EmulatedStage(compute, spans) for _ in range(num_stages)))
        self.spans = spans


class EmulatedStage(nn.Module):
    """The layer of one stage."""

    def __init__(self, compute: EmulatedCompute, spans: list[Span]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.compute, self.spans = compute, spans

    def forward(self, x: Tensor) -> Tensor:
        begin = time.perf_counter()
        x = _Compute.apply(x, self.weight, self)
        self.spend("forward", len(x), begin)
        return x

    def spend(self, kind: str, samples: int, begin: float) -> None:
        """Takes the time of a pass that has started at ``begin``."""
        seconds = self.compute.forward_seconds if kind == "forward" else self.compute.backward_seconds
        self.compute.spend(samples / BATCH_SIZE * seconds, begin)
        self.spans.append((kind, begin, time.perf_counter()))


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stage: EmulatedStage) -> Tensor:
        ctx.stage = stage
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.stage.spend("backward", len(gradient), time.perf_counter())
        return gradient, torch.ones_like(ctx.stage.weight), None


def parse_candidate(text: str) -> EAPipeConfig:
    """Parses ``METHOD`` or ``METHOD:SETTING=VALUE,...``; ValueError if it is unknown or a value out of its range."""
    fixed = {"algorithm": text.partition(":")[0], "split": "parameters", "num_pipelines": 1}
    config: EAPipeConfig = parse_named(text, dict.fromkeys(ALGORITHMS, EAPipeConfig), fixed)
    return config


def trace(engine: EAPipe, stages: EmulatedStages, batch: tuple[Tensor, Tensor]) -> list[list[Span]]:
    """Returns the passes of each stage for twice as many mini-batches as stages; all ranks are on one machine."""
    before = len(stages.spans)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(2 * len(stages)):
        engine.train_batch(batch)
    engine.flush()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (start, stages.spans[before:]))
    origin = min(began for began, _ in gathered)
    return [[(kind, begin - origin, end - origin) for kind, begin, end in passes] for _, passes in reversed(gathered)]


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def _table(result: dict[str, Any], run: dict[str, Any]) -> str:
    bandwidth, mib, stage = result["bandwidth"], result["settings"]["activation_mib"], run["stage_seconds"]
    rows = []
    for candidate in run["candidates"]:
        seconds, busy = median(candidate["seconds"]), median(candidate["processor_seconds"])
        cells = f"{seconds * 1e3:.1f}", f"{stage / seconds:.0%}", f"{busy * 1e3:.1f}"
        rows.append([readable(candidate["name"]), *cells])
    travel = mib * MIB / bandwidth * 1e3
    return f"""### {result["world_size"]} stages of {stage * 1e3:g} ms

A stage computes {stage * 1e3:g} ms for each mini-batch, and activations of {mib:g} MiB travel {travel:.1f} ms (TCP
reaches {bandwidth * 8 / 1e6:.0f} Mbit/s). The share is of the throughput of stages that never wait; the processor time
is that of a stage for a mini-batch, of all threads.

{table(["", "ms a mini-batch", "of the limit", "processor ms"], rows)}"""


if __name__ == "__main__":
    sys.exit(command.main("benchmarks.stages:Stages"))
