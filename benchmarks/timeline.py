"""``python -m benchmarks.timeline``: computation and communication in training steps, recorded (DeAR, Fig. 2)."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

import benchmarks.baselines  # noqa: F401 - adds to what can be drawn
from benchmarks import command
from benchmarks.parts import OF_PARTS, draw_span
from lightning_pipesync.core.comm.handle import Handle, Promise
from lightning_pipesync.core.parameters import modules_with_parameters
from lightning_pipesync.core.trace import Trace, TraceRecorder, gather_traces, write_merged
from lightning_pipesync.lab.bench.bandwidth import measure_bandwidth
from lightning_pipesync.lab.bench.benchmark import Progress
from lightning_pipesync.lab.bench.candidates import Candidate, Trainable, makers
from lightning_pipesync.lab.bench.models import EMULATED
from lightning_pipesync.lab.bench.pictures import picture
from lightning_pipesync.lab.bench.step import StepBenchmark
from lightning_pipesync.lab.bench.tables import table

COMPUTATION = ("forward", "backward")


@dataclass(frozen=True)
class Span:
    """A span of computation or communication, in seconds."""

    kind: str  # forward or backward; reduce-scatter, all-gather or all-reduce
    number: int  # of the layer in the order of execution, or of the operation of this kind
    start: float
    end: float


class Recorder:
    """Records the computation and the communication of a candidate on this rank."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._counts: dict[str, int] = {}
        self._backward: dict[int, list[float]] = {}  # by layer: its start, and when its gradients were ready

    def watch(self, candidate: Candidate) -> None:
        """Registers hooks on the modules that hold parameters themselves, and on the communication."""
        for number, module in enumerate(modules_with_parameters(candidate.model.module)):
            started: list[float] = []
            module.register_forward_pre_hook(lambda *_, started=started: started.append(time.perf_counter()))
            module.register_forward_hook(
                lambda *_, number=number, started=started: self._note("forward", number, started.pop())
            )
            module.register_full_backward_pre_hook(partial(self._record_backward, number))
            for parameter in module.parameters(recurse=False):
                parameter.register_post_accumulate_grad_hook(partial(self._record_backward, number))
        if candidate.transport is not None:
            for name in ("reduce_scatter", "all_gather", "all_reduce"):
                self._watch_operation(candidate.transport, name)
        elif isinstance(candidate, Trainable) and isinstance(candidate.module, nn.parallel.DistributedDataParallel):
            candidate.module.register_comm_hook(None, lambda _, bucket: self._all_reduce(bucket))

    def end_step(self) -> None:
        """Records the spans of the backward pass."""
        for number, moments in self._backward.items():
            self.spans.append(Span("backward", number, moments[0], moments[-1]))
        self._backward.clear()

    def _record_backward(self, number: int, *_: Any) -> None:
        self._backward.setdefault(number, []).append(time.perf_counter())

    def _note(self, kind: str, number: int, start: float) -> None:
        self.spans.append(Span(kind, number, start, time.perf_counter()))

    def _begin(self, kind: str) -> Callable[[], None]:
        """Starts the span of an operation; returns a function that ends it."""
        number, start = self._counts.get(kind, 0), time.perf_counter()
        self._counts[kind] = number + 1
        return lambda: self._note(kind, number, start)

    def _watch_operation(self, transport: Any, name: str) -> None:
        operation, kind = getattr(transport, name), name.replace("_", "-")

        def watched(*args: Any, **settings: Any) -> Handle[Tensor]:
            end = self._begin(kind)
            handle, promise = operation(*args, **settings), Promise[Tensor]()

            def watch() -> None:  # on a thread, because the result may be ready before anyone waits for it
                promise.run(handle.wait)
                end()

            threading.Thread(target=watch, daemon=True).start()
            return Handle(promise.wait)

        setattr(transport, name, watched)

    def _all_reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Averages a bucket, as DDP does by default."""
        end, buffer = self._begin("all-reduce"), bucket.buffer().div_(dist.get_world_size())
        work = dist.all_reduce(buffer, async_op=True)
        assert work is not None

        def finish(future: Future[list[Tensor]]) -> Tensor:
            end()
            return future.value()[0]

        return work.get_future().then(finish)


@dataclass(frozen=True, kw_only=True)
class Timeline(StepBenchmark):
    """Draws when training steps compute and when they communicate, by method.

    Attributes:
        hosts: Number of hosts, one rank each. Not used if a launcher has started this process.
        model: emulated-alexnet, emulated-resnet50, emulated-densenet201, emulated-inceptionv4, emulated-bert-base or
            emulated-bert-large, whose layers sleep.
        methods: What is drawn: ddp, serial, wfbp, mg-wfbp, horovod, byte-scheduler, ps, and methods of this package,
            with settings as in `pipesync bench step`.
        ratio: Communication time over computation time.
        bucket_mb: Bucket sizes in MiB of DDP and of methods with buckets.
        steps: Steps that are drawn.
        trace: File for a trace of as many further steps on all threads of all ranks, to open in ui.perfetto.dev.
    """

    hosts: tuple[int, ...] = (2,)
    model: str = "emulated-resnet50"
    methods: tuple[str, ...] = ("ddp", "dear")
    ratio: float = 1.0
    bucket_mb: tuple[float, ...] = (2,)
    steps: int = 2
    trace: str | None = None

    name = "timeline"

    def __post_init__(self) -> None:
        if not self.model.startswith(EMULATED):
            raise ValueError(f"model={self.model!r}: a timeline is drawn of an emulated model.")
        if {"fsdp2", "zero"} & set(self.methods):
            raise ValueError(f"methods={self.methods!r}: what FSDP2 and ZeRO communicate cannot be seen from outside.")
        if len(self.hosts) != 1:
            raise ValueError(f"hosts={[*self.hosts]}: a timeline is drawn for one number of hosts.")
        self._check_positive("ratio")
        super().__post_init__()

    @property
    def num_measurements(self) -> int:
        return len(makers(self.methods, self.bucket_mb))

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Records some steps of every candidate, one candidate after the other; a collective call.

        The ``spans`` are those of rank 0, in seconds since the start of the first step.
        """
        build = self.emulated_builder(self.ratio, measure_bandwidth())
        torch.manual_seed(0)
        timelines, traces = [], dict[str, Sequence[Trace | None]]()
        for candidate in [make(build()) for make in makers(self.methods, self.bucket_mb)]:
            candidate.prepare()
            if self.trace is not None:  # before the recorder's hooks and threads
                traces[candidate.name] = gather_traces(trace_of(candidate, self.steps))
            timelines.append({"name": candidate.name, **record(candidate, self.steps)})
            candidate.close()
            progress(candidate.name)
        if self.trace is not None and dist.get_rank() == 0:
            write_merged(Path(self.trace), traces)
        return {"settings": self.settings(), "world_size": dist.get_world_size(), "timelines": timelines}

    def report(self, results: list[dict[str, Any]]) -> str:
        return as_markdown(results[0])

    def draw(self, results: list[dict[str, Any]]) -> None:
        """Draws a panel per candidate, with a row for computation and one for communication, and the ends of steps."""
        timelines = results[0]["timelines"]
        shown = {span["kind"] for timeline in timelines for span in timeline["spans"]}
        colours = {kind: color for kind, color in OF_PARTS.items() if kind in shown}
        legend: Any = {"legend": "above", "patches": colours, "legend_columns": len(colours)}
        size, path = (10, 0.6 + 1.4 * len(timelines)), self.output / "timeline.png"
        with picture(path, size, rows=len(timelines), sharex=True, **legend) as panels:
            for [panel], timeline in zip(panels, timelines, strict=True):
                for span in timeline["spans"]:
                    row = 1 if span["kind"] in COMPUTATION else 0
                    draw_span(panel, row, span["start"], span["end"], span["kind"], span["number"])
                for end in timeline["steps"]:
                    panel.axvline(end, color="black", linewidth=0.8, linestyle=":")
                panel.set_yticks([1, 0], ["computation", "communication"])
                panel.set_title(timeline["name"], loc="left", fontsize="medium")
            panels[-1, 0].set_xlabel("seconds")


def record(candidate: Candidate, num_steps: int, warmup: int = 3) -> dict[str, Any]:
    """Returns the ``spans`` of some steps on this rank, and the ends of the ``steps``; a collective call."""
    recorder = Recorder()
    recorder.watch(candidate)
    for _ in range(warmup):
        candidate.step()
        recorder.end_step()
    dist.barrier()
    began, ends = time.perf_counter(), []
    recorder.spans.clear()
    for _ in range(num_steps):
        candidate.step()
        recorder.end_step()
        ends.append(time.perf_counter() - began)
    candidate.drain()
    within = [(s, max(0.0, s.start - began), min(ends[-1], s.end - began)) for s in recorder.spans]
    spans = [asdict(Span(s.kind, s.number, start, end)) for s, start, end in within if start < end]
    return {"spans": spans, "steps": ends}


def trace_of(candidate: Candidate, num_steps: int) -> Trace | None:
    """Returns the trace of some steps on this rank, after one in which the profiler warms up; a collective call."""
    recorder = TraceRecorder(1, num_steps)
    recorder.start()
    for _ in range(1 + num_steps):
        candidate.step()
        recorder.end_step()
    recorder.stop()
    candidate.drain()
    return recorder.trace


def as_markdown(result: dict[str, Any]) -> str:
    """Returns a table of the computation, the communication and their overlap in a step, by candidate."""
    rows = []
    for timeline in result["timelines"]:
        spans, steps = timeline["spans"], len(timeline["steps"])
        computing = [(s["start"], s["end"]) for s in spans if s["kind"] in COMPUTATION]
        communicating = [(s["start"], s["end"]) for s in spans if s["kind"] not in COMPUTATION]
        computed, total = length(computing), length(communicating)
        hidden = computed + total - length(computing + communicating)
        share = f"{hidden / total:.0%}" if total else ""
        parts = (timeline["steps"][-1], computed, total)
        rows.append([timeline["name"], *(f"{part / steps * 1e3:.0f}" for part in parts), share])
    return table(["", "ms a step", "computing", "communicating", "of it hidden"], rows)


def length(spans: list[tuple[float, float]]) -> float:
    """Returns the length of the union of spans."""
    total, covered = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, covered))
        covered = max(covered, end)
    return total


if __name__ == "__main__":
    sys.exit(command.main("benchmarks.timeline:Timeline"))
