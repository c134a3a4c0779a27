"""Measures hosts, network and model, and runs the methods that are predicted to be best."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import datetime
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_pipesync.bench.bandwidth import measure_bandwidth
from lightning_pipesync.bench.preflight import findings, own_facts
from lightning_pipesync.bench.round_robin import time_round_robin
from lightning_pipesync.bench.step import measure_link
from lightning_pipesync.core.clock import Clock
from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.core.cost import LinkCost
from lightning_pipesync.core.transport import Transport
from lightning_pipesync.methods.dear.eager import measure_link as measure_halves
from lightning_pipesync.plan.cluster import Cluster
from lightning_pipesync.plan.links import measure_links, outliers, several_connections
from lightning_pipesync.plan.model import PlanSettings
from lightning_pipesync.plan.predictions import predict
from lightning_pipesync.plan.proof import run_in_turns, to_prove
from lightning_pipesync.plan.saved import of_result
from lightning_pipesync.plan.work import Work, measure_work, slow_ranks, slowest

#: The codecs whose all-reduce is measured.
CODECS = ("none", "bf16", "int8", "int4")

#: Sizes in bytes of the all-reduces that are measured, and how many of each.
SIZES, ROUNDS = (2**18, 2**20, 2**22), 4

#: Bytes of a buffer that codecs encode and decode, and how often.
CODED, CODINGS = 2**24, 5

T = TypeVar("T")


def measure_plan(settings: PlanSettings, progress: Callable[[str], object]) -> dict[str, Any]:
    """Measures hosts, network and model, and how long steps with the best methods take; a collective call.

    Returns:
        What :func:`plan_for` does, with ``measured``.
    """
    progress("the model")
    result = plan_for(measure_work(settings.build()), asdict(settings), progress, settings.device)
    work, cluster, _ = of_result(result)
    chosen = to_prove(predict(work, cluster)) if settings.rounds else []
    return {**result, "measured": run_in_turns(chosen, settings, progress)}


def plan_for(
    work: Work, settings: Mapping[str, Any], progress: Callable[[str], object], device: torch.device | str
) -> dict[str, Any]:
    """Measures hosts and network, and predicts a step with each method; a collective call.

    Args:
        work: what this rank computes in a step.
        settings: to be kept with the result.
        progress: called with what was measured.
        device: where gradients are.

    Returns:
        When it was ``made``; ``settings``; ``findings``: what is wrong with hosts and links; ``links``; ``cluster``;
        ``work`` of the slowest rank; ``codecs``: bytes per second, on rank 0; ``changes``: none; ``predictions``; and
        ``measured``: by name of the :class:`Prediction` seconds of a step in each round, or an error; there are none.
    """
    facts, everyones = _gathered(own_facts(dist.get_rank())), _gathered(work)
    names = [one.name for one in facts]
    cluster = measure_cluster(device)
    progress("the network")
    links, work = measure_links(cluster.bandwidth), slowest(everyones)
    return {
        "made": datetime.now().isoformat(sep=" ", timespec="minutes"),
        "settings": dict(settings),
        "world_size": cluster.world_size,
        "cluster": asdict(cluster),
        "work": asdict(work),
        "codecs": {codec: codec_speed(codec, device) for codec in CODECS if codec != "none"},
        "findings": [
            *findings(facts),
            *outliers(links, names),
            *several_connections(cluster.bandwidth),
            *slow_ranks(everyones, names),
            *_idle_gpu(device),
        ],
        "links": asdict(links),
        "changes": [],
        "predictions": [asdict(one) for one in predict(work, cluster)],
        "measured": {},
    }


def measure_cluster(device: torch.device | str) -> Cluster:
    """Measures the network, and returns what rank 0 has measured, on all ranks; a collective call."""
    bandwidth, backend = measure_bandwidth(), measure_link(device)
    transport = Transport(device)
    try:
        halves = measure_halves(transport)
        all_reduces = {codec: _measure_all_reduce(transport, codec) for codec in CODECS}
    finally:
        transport.close()
    own = Cluster(dist.get_world_size(), bandwidth, backend, halves, all_reduces)
    return _gathered(own)[0]  # the same predictions on all ranks


def _idle_gpu(device: torch.device | str) -> list[str]:
    if torch.device(device).type == "cuda" or not torch.cuda.is_available():
        return []
    return ["There is a GPU, and this plan is for processors: add --device cuda for a plan over NCCL."]


def _gathered(own: T) -> list[T]:
    """Returns what each rank has; a collective call."""
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    return everyones


def codec_speed(name: str, device: torch.device | str) -> float:
    """Returns the bytes of fp32 values per second that this rank's device encodes and decodes with a codec."""
    codec, clock, values = get_codec(name), Clock(torch.device(device)), torch.randn(CODED // 4, device=device)
    wire = torch.empty(codec.wire_bytes(len(values), values.dtype), dtype=torch.uint8, device=device)
    decoded = torch.empty_like(values)
    moments = [clock.now()]
    for _ in range(CODINGS):
        codec.encode(values, wire)
        codec.decode(wire, decoded, values.dtype)
        moments.append(clock.now())
    return CODED / median(clock.seconds_between(*pair) for pair in pairwise(moments))


def _measure_all_reduce(transport: Transport, codec: str) -> LinkCost:
    """Returns alpha and beta of this package's all-reduce of fp32; a collective call."""
    buffers = {str(size): torch.zeros(size // 4, device=transport.device) for size in SIZES}
    feedback = {name: None if codec == "none" else transport.feedback(flat) for name, flat in buffers.items()}

    def all_reduce(name: str) -> None:
        transport.all_reduce(buffers[name], codec=codec, mean=True, feedback=feedback[name]).wait()

    timed = time_round_robin({name: partial(all_reduce, name) for name in buffers}, ROUNDS)
    points = [(int(name), seconds) for name, measured in timed.items() for seconds in measured.seconds]
    num_bytes, seconds = zip(*points, strict=True)
    return LinkCost.fit(num_bytes, seconds, transport.world_size)
