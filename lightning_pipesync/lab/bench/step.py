"""The time of a training step by method, compared with the theoretical limits (DeAR, Figs. 7 and 8; Eqs. 6-8)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.core.cost import LinkCost, StepCost, end_of_pipeline
from lightning_pipesync.core.layer_limits import LayerLimits
from lightning_pipesync.core.pipe_cost import PipeCost
from lightning_pipesync.lab.bench.bandwidth import measure_bandwidth
from lightning_pipesync.lab.bench.candidate import Candidate
from lightning_pipesync.lab.bench.candidates import ddp_name, makers, without_communication
from lightning_pipesync.lab.bench.models import MODEL_NAMES, BenchModel, build_model, computation_seconds
from lightning_pipesync.lab.bench.profile import Profile, profile_step
from lightning_pipesync.lab.bench.round_robin import time_round_robin

#: Sizes in MiB of the all-reduces from which alpha and beta are fitted.
LINK_MB = (0.25, 1.0, 4.0)


@dataclass(frozen=True)
class StepSettings:
    """The settings of the benchmark.

    Attributes:
        model: a name for :func:`build_model`.
        scale: the scale of the tensors of an emulated model.
        methods: what is compared, see :func:`makers`.
        ratios: communication time over computation time, of an emulated model; empty for a real one.
        bucket_mb: bucket sizes of DDP and DeAR, in MiB; DDP's best one counts.
        steps: the number of steps of a measurement.
        rounds: the number of measurements of each candidate.

    Raises:
        ValueError: a setting is out of its range; the message names it and its value.
    """

    model: str
    scale: float
    methods: tuple[str, ...]
    ratios: tuple[float, ...]
    bucket_mb: tuple[float, ...]
    steps: int
    rounds: int

    def __post_init__(self) -> None:
        if self.model not in MODEL_NAMES:
            raise ValueError(f"model={self.model!r} is not known; there are {', '.join(MODEL_NAMES)}.")
        for name in ("scale", "steps", "rounds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)!r}.")
        if not all(ratio > 0 for ratio in self.ratios):
            raise ValueError(f"ratio must be positive, got {self.ratios!r}.")
        if not self.bucket_mb or not all(size > 0 for size in self.bucket_mb):
            raise ValueError(f"bucket_mb must be one or more positive numbers of MiB, got {self.bucket_mb!r}.")
        makers(self.methods, self.bucket_mb)  # raises if one is unknown


def measure_step(settings: StepSettings, progress: Callable[[str], object]) -> dict[str, Any]:
    """Times a step of every candidate, in turns, for each ratio; a collective call.

    Returns:
        Settings; ``num_bytes`` of the gradient; bandwidth in bytes per second; ``link``: alpha and beta of the
        backend's all-reduce; and ``runs``: the results of :func:`measure_run` for each ratio.
    """
    bandwidth, link = measure_bandwidth(), measure_link()
    if settings.ratios:
        runs = [measure_emulated(settings, ratio, bandwidth, link, progress) for ratio in settings.ratios]
    else:
        runs = [measure_run(settings, partial(build_model, settings.model), bandwidth, link, progress)]
    return {
        "settings": asdict(settings),
        "world_size": dist.get_world_size(),
        "bandwidth": bandwidth,
        "link": asdict(link),
        "runs": runs,
    }


def measure_emulated(
    settings: StepSettings, ratio: float, bandwidth: float, link: LinkCost, progress: Callable[[str], object]
) -> dict[str, Any]:
    """Runs :func:`measure_run` for an emulated model with the duration of computation of a ratio."""
    build = emulated_builder(settings, ratio, bandwidth)
    return measure_run(settings, build, bandwidth, link, lambda text: progress(f"ratio {ratio:g}: {text}"))


def emulated_builder(settings: StepSettings, ratio: float, bandwidth: float) -> Callable[[], BenchModel]:
    """Returns a factory of the emulated model, with the duration of computation of a ratio."""
    build = partial(build_model, settings.model, scale=settings.scale)
    forward, backward = computation_seconds(gradient_bytes(build()), dist.get_world_size(), bandwidth, ratio)
    return partial(build, forward_seconds=forward, backward_seconds=backward)


def measure_run(
    settings: StepSettings,
    build: Callable[[], BenchModel],
    bandwidth: float,
    link: LinkCost,
    progress: Callable[[str], object],
) -> dict[str, Any]:
    """Times a step of every candidate, in turns; a collective call.

    Returns:
        ``num_bytes`` of the gradient; ``cost``: the parts of a step, from which the limits follow; and for each
        candidate its ``seconds`` and ``processor_seconds`` per step, round by round, its ``limit``, the same for the
        layers of this model, for DDP and Pipe-SGD the time ``predicted`` by the cost model, and the result of its
        ``search``, if there is one.
    """
    torch.manual_seed(0)  # the same weights on all ranks, which not every candidate broadcasts
    alone = without_communication(build())
    candidates = [alone, *(make(build()) for make in makers(settings.methods, settings.bucket_mb))]
    world_size, num_bytes = dist.get_world_size(), gradient_bytes(alone.model)
    profile = profile_step(alone)
    half = (world_size - 1) / world_size * num_bytes / bandwidth
    cost = StepCost(profile.forward, profile.backward, profile.update, half, half)
    by_name = {candidate.name: candidate for candidate in candidates}
    limits = {c.compression: LayerLimits(cost.compressed(c.compression), profile.tensors) for c in candidates}
    found = {name: candidate.prepare() for name, candidate in by_name.items()}

    steps = {name: -(-settings.steps // one.period) * one.period for name, one in by_name.items()}

    def run(candidate: Candidate) -> None:
        for _ in range(steps[candidate.name]):
            candidate.step()

    def after(name: str) -> None:
        by_name[name].drain()
        progress(name)

    timed = time_round_robin(
        {name: partial(run, candidate) for name, candidate in by_name.items()},
        settings.rounds,
        before=lambda name: by_name[name].begin(),
        after=after,
    )
    for candidate in candidates:
        candidate.close()
    predicted = {ddp_name(mib): predict_ddp(profile, link, world_size, mib) for mib in settings.bucket_mb}
    pipe = PipeCost(profile.update, profile.forward, profile.backward, num_bytes, world_size, link)
    for one in candidates:
        if one.segments is not None:
            predicted[one.name] = pipe.step(segments=one.segments, compression=one.compression)
    return {
        "num_bytes": num_bytes,
        "cost": asdict(cost),
        "candidates": [
            {
                "name": name,
                "seconds": [value / steps[name] for value in measured.seconds],
                "processor_seconds": [value / steps[name] for value in measured.processor_seconds],
                "limit": getattr(cost.compressed(by_name[name].compression), by_name[name].limit),
                "layer_limit": limits[by_name[name].compression].get(by_name[name].limit),
                "predicted": predicted.get(name),
                "search": found[name],
            }
            for name, measured in timed.items()
        ],
    }


def gradient_bytes(model: BenchModel) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.module.parameters())


def measure_link(rounds: int = 5) -> LinkCost:
    """Returns alpha and beta of the backend's all-reduce, which DDP uses; a collective call."""
    buffers = {f"{size}": torch.zeros(round(size * MIB / 4)) for size in LINK_MB}
    timed = time_round_robin({name: partial(dist.all_reduce, buffer) for name, buffer in buffers.items()}, rounds)
    points = [(buffers[name].numel() * 4, value) for name, measured in timed.items() for value in measured.seconds]
    num_bytes, seconds = zip(*points, strict=True)
    return LinkCost.fit(num_bytes, seconds, dist.get_world_size())


def predict_ddp(profile: Profile, link: LinkCost, world_size: int, bucket_mb: float) -> float:
    """Returns the predicted seconds of a step of DDP, with serial all-reduces of its buckets, each once it is full."""
    ready, durations, filled = [], [], 0
    for i, tensor in enumerate(profile.tensors):
        filled += tensor.num_bytes
        if filled >= bucket_mb * MIB or i == len(profile.tensors) - 1:
            ready.append(tensor.ready)
            durations.append(link.all_reduce(filled, world_size))
            filled = 0
    return profile.forward + max(profile.backward, end_of_pipeline(ready, durations)) + profile.update
