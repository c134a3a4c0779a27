"""The throughput of a pipeline by method, compared with stages that never wait (EA-Pipe, Tables 2 and 5)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD

from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.lab.bench.bandwidth import measure_bandwidth
from lightning_pipesync.lab.bench.named_settings import parse_named
from lightning_pipesync.lab.papers.emulated_stages import EmulatedStages
from lightning_pipesync.methods.ea_pipe import EAPipe, EAPipeConfig
from lightning_pipesync.methods.ea_pipe.config import ALGORITHMS

#: Samples of a mini-batch, a multiple of the number of micro-batches.
BATCH_SIZE = 64


@dataclass(frozen=True)
class StagesSettings:
    """The settings of the benchmark.

    Attributes:
        methods: the candidates, see :func:`parse_candidate`.
        stage_ms: the duration of both passes of a mini-batch in a stage, in milliseconds.
        activation_mib: the size of the activations of a mini-batch between two stages, in MiB.
        steps: the number of mini-batches of a measurement.
        rounds: the number of measurements of each candidate, in turns.

    Raises:
        ValueError: a setting is out of its range; the message names it and its value.
    """

    methods: tuple[str, ...]
    stage_ms: tuple[float, ...]
    activation_mib: float
    steps: int
    rounds: int

    def __post_init__(self) -> None:
        for method in self.methods:
            parse_candidate(method)
        for name in ("activation_mib", "steps", "rounds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)!r}.")
        if not self.stage_ms or not all(milliseconds > 0 for milliseconds in self.stage_ms):
            raise ValueError(f"stage_ms must be one or more positive numbers of ms, got {self.stage_ms!r}.")


def parse_candidate(text: str) -> EAPipeConfig:
    """Parses ``METHOD`` or ``METHOD:SETTING=VALUE,...`` into settings.

    Raises:
        ValueError: the method or a setting is unknown, or a value out of its range.
    """
    name = text.partition(":")[0]
    config: EAPipeConfig = parse_named(
        text, dict.fromkeys(ALGORITHMS, EAPipeConfig), {"algorithm": name, "split": "parameters"}
    )
    return config


def measure_stages(settings: StagesSettings, progress: Callable[[str], object]) -> dict[str, Any]:
    """Times mini-batches of every candidate in the steady state, in turns; a collective call.

    Returns:
        Settings; bandwidth in bytes per second; and for each of ``stage_ms`` the seconds of a mini-batch in a stage
        that never waits, and by candidate the measured seconds and the processor seconds of a stage, round by round,
        and the ``trace`` of some mini-batches from an empty pipeline to an empty one: for each stage the kind, start
        and end of its passes, in seconds.
    """
    bandwidth = measure_bandwidth()
    runs = [measure_run(settings, milliseconds / 1e3, progress) for milliseconds in settings.stage_ms]
    return {"settings": asdict(settings), "world_size": dist.get_world_size(), "bandwidth": bandwidth, "runs": runs}


def measure_run(settings: StagesSettings, stage_seconds: float, progress: Callable[[str], object]) -> dict[str, Any]:
    """Runs :func:`measure_stages` for one duration of a stage, of which a third is the forward pass."""
    num_stages = dist.get_world_size()
    batch = torch.zeros(BATCH_SIZE, max(1, round(settings.activation_mib * MIB / 4 / BATCH_SIZE))), torch.zeros(1)
    stages, engines = {}, {}
    for name in settings.methods:
        stages[name] = EmulatedStages(
            num_stages, BATCH_SIZE, forward_seconds=stage_seconds / 3, backward_seconds=stage_seconds * 2 / 3
        )
        engines[name] = EAPipe(stages[name], _loss, lambda ps: SGD(ps, lr=1e-3), parse_candidate(name))
    seconds = torch.zeros(len(engines), settings.rounds, dtype=torch.float64)
    processor = torch.zeros_like(seconds)
    for round_ in range(settings.rounds):
        for i, (name, engine) in enumerate(engines.items()):
            for _ in range(3 * num_stages):  # until the steady state
                engine.train_batch(batch)
            start, processor_start = time.perf_counter(), time.process_time()
            for _ in range(settings.steps):
                engine.train_batch(batch)
            seconds[i, round_] = (time.perf_counter() - start) / settings.steps
            processor[i, round_] = (time.process_time() - processor_start) / settings.steps
            engine.flush()
            dist.barrier()
            progress(name)
    traces = {name: trace(engine, stages[name], batch) for name, engine in engines.items()}
    for engine in engines.values():
        engine.detach()
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    dist.all_reduce(processor)
    processor /= num_stages
    return {
        "stage_seconds": stage_seconds,
        "candidates": [
            {"name": name, "seconds": wall, "processor_seconds": busy, "trace": traces[name]}
            for name, wall, busy in zip(engines, seconds.tolist(), processor.tolist(), strict=True)
        ],
    }


def trace(engine: EAPipe, stages: EmulatedStages, batch: tuple[Tensor, Tensor]) -> list[list[tuple[str, float, float]]]:
    """Returns the passes of each stage for twice as many mini-batches as stages; all ranks are on one machine."""
    before = len(stages.spans)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(2 * len(stages)):
        engine.train_batch(batch)
    engine.flush()
    spans = stages.spans[before:]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (start, spans))
    origin = min(began for began, _ in gathered)
    return [[(kind, begin - origin, end - origin) for kind, begin, end in passes] for _, passes in reversed(gathered)]


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()
