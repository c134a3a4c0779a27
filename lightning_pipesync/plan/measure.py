"""Measures hosts, network and model, predicts what each method gains, and runs the best ones."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_pipesync.bench.bandwidth import measure_bandwidth
from lightning_pipesync.bench.candidate import Candidate
from lightning_pipesync.bench.candidates import makers, without_communication
from lightning_pipesync.bench.models import MODEL_NAMES, BenchModel, build_model
from lightning_pipesync.bench.preflight import findings, own_facts
from lightning_pipesync.bench.round_robin import time_round_robin
from lightning_pipesync.bench.step import Profile, measure_link, profile_step
from lightning_pipesync.core.cost import LinkCost
from lightning_pipesync.core.transport import Transport
from lightning_pipesync.methods.dear.eager import measure_link as measure_halves
from lightning_pipesync.plan.cluster import Cluster
from lightning_pipesync.plan.links import measure_links, outliers
from lightning_pipesync.plan.predictions import Prediction, predict

#: The codecs whose all-reduce is measured.
CODECS = ("none", "int8")

#: Sizes in bytes of the all-reduces that are measured, and how many of each.
SIZES, ROUNDS = (2**18, 2**20, 2**22), 4

#: A rank is slow whose computation takes so many times as long as a median rank's.
SLOW_HOST = 1.15

#: How many of the best exact and inexact methods are run, besides DDP.
PROVEN = 2


@dataclass(frozen=True)
class PlanSettings:
    """What is planned.

    Attributes:
        model: a name for :func:`build_model`, or ``MODULE:FUNCTION``, which returns a module, a batch, and a function
            that computes the loss from both.
        scale: the scale of the tensors of an emulated model.
        compute_ms: forward and backward pass of an emulated model, in milliseconds.
        steps: the least number of steps of a measurement.
        rounds: the number of measurements of each method that is run; 0: none is.

    Raises:
        ValueError: a setting is out of its range; the message names it and its value.
    """

    model: str
    scale: float
    compute_ms: float
    steps: int
    rounds: int

    def __post_init__(self) -> None:
        if self.model not in MODEL_NAMES and ":" not in self.model:
            raise ValueError(f"model={self.model!r} is neither MODULE:FUNCTION nor one of {', '.join(MODEL_NAMES)}.")
        for name in ("scale", "compute_ms", "steps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)!r}.")
        if self.rounds < 0:
            raise ValueError(f"rounds must not be negative, got {self.rounds!r}.")

    def build(self) -> BenchModel:
        """Returns the model.

        Raises:
            ValueError: there is no such function, or it returns something else.
        """
        if self.model in MODEL_NAMES:
            if not self.model.startswith("emulated-"):
                return build_model(self.model)
            forward = self.compute_ms / 3000
            return build_model(self.model, scale=self.scale, forward_seconds=forward, backward_seconds=2 * forward)
        return _users_own(self.model)


def measure_plan(settings: PlanSettings, progress: Callable[[str], object]) -> dict[str, Any]:
    """Measures hosts, network and model, and how long steps with the best methods take; a collective call.

    Returns:
        Settings; ``findings``: what is wrong with hosts and links; ``links``; ``cluster``; ``profile`` of the slowest
        rank; and by name of the :class:`Prediction` ``measured``: seconds of a step in each round, or an error.
    """
    facts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(facts, own_facts(dist.get_rank()))
    progress("the network")
    cluster = measure_cluster()
    links = measure_links(cluster.bandwidth)
    names = [one.name for one in facts]
    progress("the model")
    profile, slow = slowest_profile(profile_step(without_communication(settings.build())), names)
    chosen = to_prove(predict(profile, cluster)) if settings.rounds else []
    return {
        "settings": asdict(settings),
        "world_size": cluster.world_size,
        "cluster": asdict(cluster),
        "profile": asdict(profile),
        "findings": [*findings(facts), *outliers(links, names), *slow],
        "links": asdict(links),
        "measured": run_in_turns(chosen, settings, progress),
    }


def measure_cluster() -> Cluster:
    """Measures the network; a collective call."""
    bandwidth, backend = measure_bandwidth(), measure_link()
    transport = Transport(torch.device("cpu"))
    try:
        halves = measure_halves(transport)
        all_reduces = {codec: _measure_all_reduce(transport, codec) for codec in CODECS}
    finally:
        transport.close()
    return Cluster(dist.get_world_size(), bandwidth, backend, halves, all_reduces)


def slowest_profile(profile: Profile, names: Sequence[str]) -> tuple[Profile, list[str]]:
    """Returns the profile of the rank whose computation takes longest, and who is slow; a collective call.

    Args:
        profile: this rank's.
        names: of all ranks.
    """
    profiles: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(profiles, profile)
    seconds = [one.forward + one.backward for one in profiles]
    usual = sorted(seconds)[(len(seconds) - 1) // 2]
    slow = [
        f"{name}: its computation takes {1e3 * own:.0f} ms, and that of most {1e3 * usual:.0f} ms: all others wait for "
        "it. Look for other processes there, too many threads, or a slower processor."
        for name, own in zip(names, seconds, strict=True)
        if own > SLOW_HOST * usual
    ]
    return profiles[seconds.index(max(seconds))], slow


def to_prove(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Returns DDP, and the best of the exact and of the other methods; SelSync's steps depend on the gradient."""
    ranked = sorted(predictions, key=lambda one: one.seconds)
    of_kind = {
        exact: [one for one in ranked if one.exact == exact and one.method not in ("ddp", "selsync")]
        for exact in (True, False)
    }
    ddp = [one for one in ranked if one.method == "ddp"]
    return [*ddp, *of_kind[True][:PROVEN], *of_kind[False][:PROVEN]]


def run_in_turns(
    chosen: Sequence[Prediction], settings: PlanSettings, progress: Callable[[str], object]
) -> dict[str, dict[str, Any]]:
    """Runs steps of each method in turns; a collective call.

    Returns:
        By name the ``seconds`` of a step in each round, or the ``error`` of a method that cannot train this model.
    """
    outcomes: dict[str, dict[str, Any]] = {}
    candidates: dict[str, Candidate] = {}
    for one in chosen:
        torch.manual_seed(0)
        try:
            candidates[one.name] = candidate = _candidate(one, settings.build())
            candidate.prepare()
        except (ValueError, RuntimeError) as error:
            outcomes[one.name] = {"error": f"{type(error).__name__}: {error}"}
            candidates.pop(one.name, None)
    # Whole periods: the average at their end is part of what a step takes.
    periods = {one.name: int(one.settings.get("period", 1)) for one in chosen}
    steps = {name: -(-settings.steps // periods[name]) * periods[name] for name in candidates}

    def run(name: str) -> None:
        for _ in range(steps[name]):
            candidates[name].step()

    def after(name: str) -> None:
        candidates[name].drain()
        progress(name)

    timed = time_round_robin(
        {name: partial(run, name) for name in candidates},
        settings.rounds,
        before=lambda name: None if periods[name] > 1 else candidates[name].begin(),
        after=after,
    )
    for name, candidate in candidates.items():
        candidate.close()
        outcomes[name] = {"seconds": [seconds / steps[name] for seconds in timed[name].seconds]}
    return {one.name: outcomes[one.name] for one in chosen}


def _candidate(prediction: Prediction, model: BenchModel) -> Candidate:
    size = prediction.settings.get("bucket_mb", 25.0)
    (make,) = makers(["ddp"] if prediction.method == "ddp" else [prediction.name], [size])
    return make(model)


def _measure_all_reduce(transport: Transport, codec: str) -> LinkCost:
    """Returns alpha and beta of this package's all-reduce of fp32; a collective call."""
    buffers = {str(size): torch.zeros(size // 4) for size in SIZES}
    feedback = {name: None if codec == "none" else transport.feedback(flat) for name, flat in buffers.items()}

    def all_reduce(name: str) -> None:
        transport.all_reduce(buffers[name], codec=codec, mean=True, feedback=feedback[name]).wait()

    timed = time_round_robin({name: partial(all_reduce, name) for name in buffers}, ROUNDS)
    points = [(int(name), seconds) for name, measured in timed.items() for seconds in measured.seconds]
    num_bytes, seconds = zip(*points, strict=True)
    return LinkCost.fit(num_bytes, seconds, transport.world_size)


def _users_own(name: str) -> BenchModel:
    """Returns what the user's function makes, of a module in the present folder or of an installed one."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a console script begins without it
    try:
        made = resolve_name(name)()
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"model={name!r}: {type(error).__name__}: {error}. Give MODULE:FUNCTION.") from error
    if not (isinstance(made, tuple) and len(made) == 3 and isinstance(made[0], nn.Module) and callable(made[2])):
        raise ValueError(
            f"model={name!r} returned {type(made).__name__}: return (module, batch, loss), of which "
            "loss(module, batch) is a scalar tensor."
        )
    module, batch, loss = made
    return BenchModel(name, module, [], lambda rank: batch, loss)
