"""Measures hosts, network and model, and runs the methods that are predicted to be best."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import datetime
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_pipesync.bench.bandwidth import measure_bandwidth
from lightning_pipesync.bench.preflight import findings, own_facts
from lightning_pipesync.bench.round_robin import time_round_robin
from lightning_pipesync.bench.step import measure_link
from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.core.cost import LinkCost
from lightning_pipesync.core.transport import Transport
from lightning_pipesync.methods.dear.eager import measure_link as measure_halves
from lightning_pipesync.plan.cluster import Cluster
from lightning_pipesync.plan.links import measure_links, outliers
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
    result = plan_for(measure_work(settings.build()), asdict(settings), progress)
    work, cluster, _ = of_result(result)
    chosen = to_prove(predict(work, cluster)) if settings.rounds else []
    return {**result, "measured": run_in_turns(chosen, settings, progress)}


def plan_for(work: Work, settings: Mapping[str, Any], progress: Callable[[str], object]) -> dict[str, Any]:
    """Measures hosts and network, and predicts a step with each method; a collective call.

    Args:
        work: what this rank computes in a step.
        settings: to be kept with the result.
        progress: called with what was measured.

    Returns:
        When it was ``made``; ``settings``; ``findings``: what is wrong with hosts and links; ``links``; ``cluster``;
        ``work`` of the slowest rank; ``codecs``: bytes per second, on rank 0; ``changes``: none; ``predictions``; and
        ``measured``: by name of the :class:`Prediction` seconds of a step in each round, or an error; there are none.
    """
    facts, everyones = _gathered(own_facts(dist.get_rank())), _gathered(work)
    names = [one.name for one in facts]
    cluster = measure_cluster()
    progress("the network")
    links, work = measure_links(cluster.bandwidth), slowest(everyones)
    return {
        "made": datetime.now().isoformat(sep=" ", timespec="minutes"),
        "settings": dict(settings),
        "world_size": cluster.world_size,
        "cluster": asdict(cluster),
        "work": asdict(work),
        "codecs": {codec: codec_speed(codec) for codec in CODECS if codec != "none"},
        "findings": [*findings(facts), *outliers(links, names), *slow_ranks(everyones, names)],
        "links": asdict(links),
        "changes": [],
        "predictions": [asdict(one) for one in predict(work, cluster)],
        "measured": {},
    }


def measure_cluster() -> Cluster:
    """Measures the network, and returns what rank 0 has measured, on all ranks; a collective call."""
    bandwidth, backend = measure_bandwidth(), measure_link()
    transport = Transport(torch.device("cpu"))
    try:
        halves = measure_halves(transport)
        all_reduces = {codec: _measure_all_reduce(transport, codec) for codec in CODECS}
    finally:
        transport.close()
    own = Cluster(dist.get_world_size(), bandwidth, backend, halves, all_reduces)
    return _gathered(own)[0]  # the same predictions on all ranks


def _gathered(own: T) -> list[T]:
    """Returns what each rank has; a collective call."""
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    return everyones


def codec_speed(name: str) -> float:
    """Returns the bytes of fp32 values per second that this rank's processor encodes and decodes with a codec."""
    codec, values = get_codec(name), torch.randn(CODED // 4)
    wire, decoded = (
        torch.empty(codec.wire_bytes(len(values), values.dtype), dtype=torch.uint8),
        torch.empty_like(values),
    )
    seconds = []
    for _ in range(CODINGS):
        start = perf_counter()
        codec.encode(values, wire)
        codec.decode(wire, decoded, values.dtype)
        seconds.append(perf_counter() - start)
    return CODED / median(seconds)


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
