"""The time of a training step, by method, beside what theory allows (DeAR, Figs. 7 and 8; Eqs. 6-8)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from lightning_pipesync.bench.bandwidth import measure_bandwidth
from lightning_pipesync.bench.contestants import (
    METHODS,
    Contestant,
    Wrapped,
    ddp_name,
    makers,
    without_communication,
)
from lightning_pipesync.bench.interleaved import time_in_turns
from lightning_pipesync.bench.models import MODEL_NAMES, BenchModel, build_model, computation_seconds
from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.core.cost import LinkCost, StepCost, end_of_pipeline
from lightning_pipesync.core.pipe_cost import PipeCost


@dataclass(frozen=True)
class StepSettings:
    """What is measured.

    Attributes:
        model: a name that :func:`build_model` knows.
        scale: by which the tensors of an emulated model are scaled.
        methods: what is compared, names that :data:`METHODS` knows.
        ratios: communication time over computation time, of an emulated model; empty for a real one.
        bucket_mb: bucket sizes of DDP and DeAR, in MiB; DDP's best one counts.
        steps: steps of one measurement.
        rounds: how often each contestant is measured.

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
        unknown = [method for method in self.methods if method not in METHODS]
        if unknown or not self.methods:
            raise ValueError(f"methods must be some of {', '.join(METHODS)}, got {', '.join(self.methods)}.")
        if not all(ratio > 0 for ratio in self.ratios):
            raise ValueError(f"ratio must be positive, got {self.ratios!r}.")
        if not self.bucket_mb or not all(size > 0 for size in self.bucket_mb):
            raise ValueError(f"bucket_mb must be one or more positive numbers of MiB, got {self.bucket_mb!r}.")


@dataclass(frozen=True)
class Profile:
    """One rank's step without communication.

    Attributes:
        forward: seconds.
        backward: seconds.
        update: seconds.
        ready: when each gradient is ready, in seconds since backward began, in that order.
        num_bytes: the size of each.
    """

    forward: float
    backward: float
    update: float
    ready: list[float]
    num_bytes: list[int]


def measure_step(settings: StepSettings, progress: Callable[[str], object]) -> dict[str, Any]:
    """Times a step of every contestant, in turns, for each ratio; a collective call.

    Returns:
        Settings; ``num_bytes`` of the gradient; bandwidth in bytes a second; ``link``: alpha and beta of the backend's
        all-reduce; and ``runs``, what :func:`measure_run` returns for each ratio.
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
    """Does :func:`measure_run` for an emulated model that computes as long as the ratio demands."""
    build = emulated_builder(settings, ratio, bandwidth)
    return measure_run(settings, build, bandwidth, link, lambda text: progress(f"ratio {ratio:g}: {text}"))


def emulated_builder(settings: StepSettings, ratio: float, bandwidth: float) -> Callable[[], BenchModel]:
    """Returns what builds the emulated model, which computes as long as the ratio demands."""
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
    """Times a step of every contestant, in turns; a collective call.

    Returns:
        ``num_bytes`` of the gradient; ``cost``: the parts of a step, which make the limits; for each contestant
        its ``seconds`` a step, round by round, its ``limit``, for DDP and Pipe-SGD what the cost model has
        ``predicted``, and what a ``search`` has found, if there is one.
    """
    torch.manual_seed(0)  # the same weights on all ranks: not every contestant sees to that
    alone = without_communication(build())
    field = [alone, *(make(build()) for make in makers(settings.methods, settings.bucket_mb))]
    world_size, num_bytes = dist.get_world_size(), gradient_bytes(alone.model)
    profile = profile_step(alone)
    half = (world_size - 1) / world_size * num_bytes / bandwidth
    cost = StepCost(profile.forward, profile.backward, profile.update, half, half)
    by_name = {contestant.name: contestant for contestant in field}
    found = {name: contestant.prepare() for name, contestant in by_name.items()}

    def run(contestant: Contestant) -> None:
        for _ in range(settings.steps):
            contestant.step()

    def after(name: str) -> None:
        by_name[name].drain()
        progress(name)

    timed = time_in_turns(
        {name: partial(run, contestant) for name, contestant in by_name.items()},
        settings.rounds,
        before=lambda name: by_name[name].begin(),
        after=after,
    )
    for contestant in field:
        contestant.close()
    predicted = {ddp_name(mib): predict_ddp(profile, link, world_size, mib) for mib in settings.bucket_mb}
    pipe = PipeCost(profile.update, profile.forward, profile.backward, num_bytes, world_size, link)
    for one in field:
        if one.segments is not None:
            predicted[one.name] = pipe.step(segments=one.segments, compression=one.compression)
    return {
        "num_bytes": num_bytes,
        "cost": asdict(cost),
        "contestants": [
            {
                "name": name,
                "seconds": [value / settings.steps for value in values],
                "limit": getattr(cost.compressed(by_name[name].compression), by_name[name].limit),
                "predicted": predicted.get(name),
                "search": found[name],
            }
            for name, values in timed.items()
        ],
    }


def gradient_bytes(model: BenchModel) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.module.parameters())


def measure_link(sizes_mib: Sequence[float] = (0.25, 1.0, 4.0), rounds: int = 5) -> LinkCost:
    """Returns alpha and beta of the backend's all-reduce, which DDP uses; a collective call."""
    buffers = {f"{size}": torch.zeros(round(size * MIB / 4)) for size in sizes_mib}
    timed = time_in_turns({name: partial(dist.all_reduce, buffer) for name, buffer in buffers.items()}, rounds)
    points = [(buffers[name].numel() * 4, seconds) for name, values in timed.items() for seconds in values]
    num_bytes, seconds = zip(*points, strict=True)
    return LinkCost.fit(num_bytes, seconds, dist.get_world_size())


def profile_step(contestant: Wrapped, rounds: int = 5) -> Profile:
    """Measures a step without communication on this rank, part by part: medians over some steps."""
    parameters = [parameter for parameter in contestant.module.parameters() if parameter.requires_grad]
    ready: list[dict[int, float]] = []
    began = 0.0
    handles = [
        parameter.register_post_accumulate_grad_hook(
            lambda parameter: ready[-1].__setitem__(id(parameter), time.perf_counter() - began)
        )
        for parameter in parameters
    ]
    parts: list[tuple[float, float, float]] = []
    for _ in range(rounds + 1):
        contestant.optimizer.zero_grad()
        ready.append({})
        start = time.perf_counter()
        loss = contestant.model.loss(contestant.module, contestant.batch)
        began = time.perf_counter()
        loss.backward()
        ended = time.perf_counter()
        contestant.optimizer.step()
        parts.append((began - start, ended - began, time.perf_counter() - ended))
    for handle in handles:
        handle.remove()
    forward, backward, update = (median(values) for values in zip(*parts[1:], strict=True))
    times = {id(p): median(step[id(p)] for step in ready[1:]) for p in parameters if id(p) in ready[-1]}
    in_order = sorted((p for p in parameters if id(p) in times), key=lambda p: times[id(p)])
    sizes = [parameter.numel() * parameter.element_size() for parameter in in_order]
    return Profile(forward, backward, update, [times[id(p)] for p in in_order], sizes)


def predict_ddp(profile: Profile, link: LinkCost, world_size: int, bucket_mb: float) -> float:
    """Returns the seconds of a step of DDP: its buckets' all-reduces one after the other, each when it is full."""
    ready, durations, filled = [], [], 0
    for i, (moment, num_bytes) in enumerate(zip(profile.ready, profile.num_bytes, strict=True)):
        filled += num_bytes
        if filled >= bucket_mb * MIB or i == len(profile.ready) - 1:
            ready.append(moment)
            durations.append(link.all_reduce(filled, world_size))
            filled = 0
    return profile.forward + max(profile.backward, end_of_pipeline(ready, durations)) + profile.update
