"""Measures hosts, network and model, and runs the methods that are predicted to be best."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, nullcontext, suppress
from dataclasses import asdict, replace
from datetime import datetime
from functools import partial
from itertools import cycle, pairwise
from statistics import median
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipesync.core.clock import Clock
from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.core.comm.torus import Torus
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.feedback import ErrorFeedback
from lightning_pipesync.core.parameters import device_of
from lightning_pipesync.lab.bench.bandwidth import measure_bandwidth
from lightning_pipesync.lab.bench.preflight import facts_of_this_host, findings
from lightning_pipesync.lab.plan.costs import Costs, Waitable, measure_links, outliers, several_connections, sizes_for
from lightning_pipesync.lab.plan.model import EACH_RANK, PlanSettings, Replicas
from lightning_pipesync.lab.plan.predictions import is_baseline, predict
from lightning_pipesync.lab.plan.saved import of_result
from lightning_pipesync.lab.plan.text import rate
from lightning_pipesync.lab.plan.trials import Trials, gathered, to_prove
from lightning_pipesync.lab.plan.work import measure_added, measure_work, slow_ranks, slowest, with_refusals
from lightning_pipesync.lab.predictions.cluster import Cluster
from lightning_pipesync.lab.predictions.registry import lab_of
from lightning_pipesync.lab.predictions.work import Work
from lightning_pipesync.training.registry import METHODS

T = TypeVar("T")

#: The lossy codecs whose all-reduce is measured.
LOSSY = ("bf16", "int8", "int4")

#: Bytes of a buffer that codecs encode and decode, and how often.
CODED, CODINGS = 2**24, 5


def measure_plan(settings: PlanSettings, progress: Callable[[str], object]) -> dict[str, Any]:
    """Measures hosts, network and model, and how long steps with the best methods take; a collective call.

    Returns what :func:`plan_for` does, with ``measured``; or only the ``error``, if the model cannot be trained.
    """
    replicas = Replicas.of(settings.ranks_per_replica, settings.device)
    model, error = _outcome_of(partial(settings.build, replicas.within))
    work, error = _outcome_of(partial(measure_work, model)) if model is not None else (None, error)
    if model is None or work is None:
        return {"error": error}
    progress("the model")
    result = plan_for(work, model.module, asdict(settings), progress, replicas)
    del model
    work, cluster, _ = of_result(result)
    if settings.rounds == 0:
        return result
    trials = Trials(settings, replicas)
    to_prove(predict(work, cluster), trials.begin)
    return {**result, "measured": trials.time(progress)}


def _outcome_of(action: Callable[[], T]) -> tuple[T | None, str]:
    """Runs what depends on the user's model; returns what it returns on all ranks, or None and what has failed on one.

    A collective call.
    """
    outcome, error = None, ""
    try:
        outcome = action()
    except Exception as raised:  # whatever the user's model raises, perhaps on this rank alone
        error = str(raised) if isinstance(raised, ValueError) else f"{type(raised).__name__}: {raised}"
    errors = [f"rank {rank}: {one}" for rank, one in enumerate(gathered(error)) if one]
    return (None, " ".join(errors[0].split())) if errors else (outcome, "")


def plan_for(
    work: Work,
    module: nn.Module,
    settings: Mapping[str, Any],
    progress: Callable[[str], object],
    replicas: Replicas = EACH_RANK,
) -> dict[str, Any]:
    """Measures hosts, network, and what methods do besides, and predicts a step with each; a collective call.

    ``work`` is what this rank computes in a step. In the result it is that of the slowest rank; ``findings`` is what is
    wrong with hosts and links; ``codecs`` are bytes per second, on rank 0; ``measured`` will have, by name of the
    :class:`Prediction`, seconds of a step in each round, or an error.
    """
    facts, everyones = gathered(facts_of_this_host(dist.get_rank())), gathered(work)
    names, device = [one.name for one in facts], device_of(module)
    cluster = measure_cluster(device, max(one.num_bytes for one in everyones), replicas)
    progress("the network")
    # Ranks of a host are near each other: pairs of hosts would have to be told from those.
    links = measure_links(cluster.bandwidth) if replicas.mesh is None else None
    work = slowest(everyones)
    work = replace(work, added=measure_added(module, work, cluster, replicas))
    work = with_refusals(work, cluster, module, replicas)
    predictions = predict(work, cluster)
    baseline = next(one for one in predictions if is_baseline(one))
    return {
        "made": datetime.now().isoformat(sep=" ", timespec="minutes"),
        "settings": dict(settings),
        "world_size": cluster.world_size,
        "cluster": asdict(cluster),
        "work": asdict(work),
        "codecs": {codec: codec_speed(codec, device) for codec in LOSSY},
        "findings": [
            *findings(facts),
            *(outliers(links, names) if links is not None else ()),
            *several_connections(cluster.bandwidth, cluster.ranks_per_replica),
            *slow_ranks(everyones, facts, baseline.seconds),
            *_other_devices(cluster, device),
        ],
        "links": None if links is None else asdict(links),
        "predictions": [asdict(one) for one in predictions],
        "measured": {},
    }


def measure_cluster(device: torch.device, num_bytes: int, replicas: Replicas = EACH_RANK) -> Cluster:
    """Measures the network for gradients of ``num_bytes``; returns rank 0's costs on all ranks; a collective call.

    ``num_bytes`` are those of a rank. All ranks of a host exchange at the same time, as in a step.
    """
    bandwidth = measure_bandwidth(stride=replicas.ranks_per_replica)
    costs = Costs(sizes_for(num_bytes, bandwidth), device, replicas)
    backend = costs.of_backend()
    connect = partial(Transport, device, replicas=replicas.between)
    torus, tree, has_trees = None, None, device.type == "cpu"
    rows = Torus.of_hosts(gathered(socket.gethostname()))
    columns = None if rows is None or replicas.mesh is not None else rows.columns
    with closing(connect()) as transport:
        halves = costs.in_a_row(_halves_in_turns(transport), 1)
        all_reduces = {"none": costs.one_by_one(all_reduce_by(transport, "none"))}
    with closing(connect(topology="auto", codec=LOSSY[0])) as transport:  # as methods exchange with a codec
        all_reduces |= {codec: costs.one_by_one(all_reduce_by(transport, codec)) for codec in LOSSY}
    if Torus.of(replicas.number) is not None and replicas.mesh is None:
        with closing(connect(topology="torus2d", torus_columns=columns)) as transport:
            torus = costs.in_a_row(_halves_in_turns(transport), 1)
    if has_trees and replicas.number > 2:
        with closing(connect(topology="tree")) as transport:
            tree = costs.in_a_row(_halves_in_turns(transport), 1)
    exchanges = {}
    for name in METHODS:
        for exchange in lab_of(name).exchanges:
            with suppress(ValueError) if replicas.mesh is not None else nullcontext():  # it refuses them, on all ranks
                exchanges[exchange.name] = costs.of_exchange(METHODS[name], exchange)
    kinds = (torus, tree, has_trees, replicas.ranks_per_replica, device.type != "cpu")
    measured = Cluster(
        replicas.number, bandwidth, backend, halves, all_reduces, exchanges, *kinds, torus_columns=columns
    )
    return gathered(measured)[0]  # the same predictions on all ranks


def _other_devices(cluster: Cluster, device: torch.device) -> Iterator[str]:
    """Yields what the plan is not for: another network of the backend, and a GPU."""
    if (bandwidth := cluster.other_bandwidth) is not None:
        yield (
            f"The backend's all-reduce carries {rate(cluster.ranks_per_replica * bandwidth)}, where plain TCP has "
            f"{rate(cluster.host_bandwidth)}: it has another network. With --from, --rate is that of this network."
        )
    if device.type != "cuda" and torch.cuda.is_available():
        yield "There is a GPU, and this plan is for processors: add --device cuda for a plan over NCCL."


def codec_speed(name: str, device: torch.device | str, num_bytes: int = CODED) -> float:
    """Returns the bytes of fp32 values per second that this rank's device encodes and decodes with a codec."""
    codec, clock = get_codec(name), Clock(torch.device(device))
    values = torch.linspace(-1, 1, num_bytes // 4, device=device)
    wire = torch.empty(codec.wire_bytes(len(values), values.dtype), dtype=torch.uint8, device=device)
    decoded = torch.empty_like(values)
    moments = [clock.now()]
    for _ in range(CODINGS):
        codec.encode(values, wire)
        codec.decode(wire, decoded, values.dtype)
        moments.append(clock.now())
    return num_bytes / median(clock.seconds_between(*pair) for pair in pairwise(moments))


def _halves_in_turns(transport: Transport) -> Callable[[Tensor], Waitable]:
    """Returns a reduce-scatter and an all-gather in turns, as DeAR has them."""
    kinds: Iterator[Callable[[Tensor], Waitable]] = cycle((transport.reduce_scatter, transport.all_gather))
    return lambda flat: next(kinds)(flat)


def all_reduce_by(transport: Transport, codec: str) -> Callable[[Tensor], Waitable]:
    """Returns this package's all-reduce, with error feedback if the codec is lossy."""
    feedbacks: dict[int, ErrorFeedback] = {}

    def all_reduce(flat: Tensor) -> Waitable:
        if codec != "none" and len(flat) not in feedbacks:
            feedbacks[len(flat)] = transport.feedback(flat)
        return transport.all_reduce(flat, codec=codec, mean=True, feedback=feedbacks.get(len(flat)))

    return all_reduce
