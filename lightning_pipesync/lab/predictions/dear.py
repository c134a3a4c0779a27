"""What the laboratory knows of DeAR."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from lightning_pipesync.core.buckets import Fusion, num_bytes, plan_buckets
from lightning_pipesync.core.clock import Clock
from lightning_pipesync.core.comm.torus import Torus
from lightning_pipesync.core.comm.tree import piece_bytes
from lightning_pipesync.core.dtensors import is_sharded
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.lab.predictions.cluster import Cluster
from lightning_pipesync.lab.predictions.entry import (
    AT_DDPS_QUALITY,
    BenchCandidate,
    LabEntry,
    Prediction,
    StandIn,
    waiting_share,
)
from lightning_pipesync.lab.predictions.limits import LayerTimes
from lightning_pipesync.lab.predictions.work import MethodWork, Profile, Work
from lightning_pipesync.methods.dear.config import DeARConfig
from lightning_pipesync.methods.dear.fusion_search import SEARCHES
from lightning_pipesync.methods.dear.schedule import COSTS, BucketTimes, EarlyGathers, MeasuredStep, simulate_step
from lightning_pipesync.methods.gradients.low_rank import FactorizedGradient, factor_bytes, is_factorized

#: The codec that is planned.
CODEC = "int4"

#: The rank of the factors that are planned; and how often their products are measured, each time for the other factor.
LOW_RANK, REPEATS = 4, 6


class DeARCandidate(BenchCandidate):
    """DeAR, whose search for bucket sizes and whose plan of early all-gathers end before the measurements."""

    def prepare(self, sync: Any, step: Callable[[], None]) -> dict[str, Any] | None:
        started, steps = time.perf_counter(), 0
        while not (sync.tuned and sync.planned):
            step()
            steps += 1
        if self.config.fusion not in ("auto", *SEARCHES):
            return None
        took, fusion = time.perf_counter() - started, sync.fusion
        tried = len({trial.seconds for trial in sync.trials})  # equal buckets are measured once
        return {"trials": tried, "steps": steps, "seconds": took, "size": fusion.bucket_mb, "edge": fusion.edge_mb}


class DeARLab(LabEntry):
    """Candidates with several bucket sizes, and predictions by a simulation of the schedule."""

    compared_by_step = True

    def bench_candidates(
        self, label: str, settings: Mapping[str, Any], bucket_mb: Sequence[float]
    ) -> list[BenchCandidate]:
        """Returns one candidate, which chooses its buckets, whatever ``bucket_mb`` says, unless its settings do."""
        config = DeARConfig(**settings)
        limit = "eager" if config.gathers_early else "two_halves"
        factors = config.low_rank is not None and config.low_rank_method == "acp_sgd"  # P and Q in turns
        return [DeARCandidate(label, config, limit=limit, period=2 if factors else 1)]

    def predict(self, work: Work, cluster: Cluster) -> Iterator[list[Prediction]]:
        """Yields each topology; with a codec; low rank; with the buckets that a simulation chooses."""
        topologies = topologies_of(cluster)
        yield [self._predict(work, cluster, topology) for topology in topologies]
        if CODEC in cluster.all_reduces:
            yield [self._predict_with_codec(work, cluster)]
        if work.measured_by(self.name).low_rank_seconds > 0:
            yield [self._predict_low_rank(work, cluster, topology) for topology in topologies]

    def quality(self, prediction: Prediction, optimizer: Optimizer) -> str | None:
        if prediction.exact:
            return "with DDP's weights"
        is_tested = type(optimizer) is AdamW and prediction.settings.get("compression") == CODEC
        return AT_DDPS_QUALITY if is_tested else None

    def measure(self, module: nn.Module, optimizer: Optimizer, inputs: Callable[[], Any] | None) -> MethodWork:
        """Measures the products of low-rank factors, unless FSDP2 has divided the matrices."""
        if is_sharded(module):
            return MethodWork()
        gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        return MethodWork(low_rank_seconds=measure_products(gradients, LOW_RANK))

    def stand_in(self, work: Work, cluster: Cluster, num_bytes: int) -> StandIn:
        return StandIn({"fusion": "buffer"}, waits=cluster.halves.all_reduce(num_bytes, cluster.world_size))

    def settings_for_racks(self, ranks_per_rack: int) -> Mapping[str, Any]:
        return {"topology": "torus2d", "torus_columns": ranks_per_rack}

    def _predict(self, work: Work, cluster: Cluster, topology: str) -> Prediction:
        seconds = step_seconds(work.profile_with(self.name), cluster, topology)
        why = waiting_share(work.seconds_with(self.name), seconds)
        return Prediction(self.name, _settings(cluster, topology), seconds, why=why)

    def _predict_with_codec(self, work: Work, cluster: Cluster) -> Prediction:
        seconds = step_seconds(work.profile_with(self.name), cluster, codec=CODEC)
        settings, why = {"compression": CODEC}, "4 bits a value, with error feedback"
        return Prediction(self.name, settings, seconds, exact=False, why=why, variant=f"compression={CODEC}")

    def _predict_low_rank(self, work: Work, cluster: Cluster, topology: str) -> Prediction:
        """Returns the prediction for ACP-SGD."""
        profile = work.profile_with(self.name, work.measured_by(self.name).low_rank_seconds)
        seconds = step_seconds(profile, cluster, topology, low_rank=LOW_RANK)
        settings = {**_settings(cluster, topology), "low_rank": LOW_RANK}
        why, variant = "low-rank factors of the gradients: worse with AdamW", f"low_rank={LOW_RANK}"
        return Prediction(self.name, settings, seconds, exact=False, why=why, variant=variant)


def _settings(cluster: Cluster, topology: str) -> dict[str, Any]:
    columns = cluster.torus_columns if topology == "torus2d" else None
    settings = {} if topology == "flat" else {"topology": topology}
    return settings if columns is None else {**settings, "torus_columns": columns}


def torus_of(cluster: Cluster) -> Torus | None:
    """Returns the torus with a row for each host of several ranks, or as square as possible; None: there is none."""
    try:
        return Torus(cluster.world_size, cluster.torus_columns)
    except ValueError:
        return None


def topologies_of(cluster: Cluster) -> list[str]:
    """Returns the values of ``topology`` that differ on so many hosts; a torus is not one of replicas in shards.

    A tree is not one of hosts with several ranks: more than one of its edges crosses each host's link, up to twice the
    bytes of other topologies (``benchmarks/scale.py``).
    """
    has_torus = cluster.ranks_per_replica == 1 and torus_of(cluster) is not None
    several = cluster.world_size > 2 and cluster.has_trees and cluster.torus_columns is None
    return ["flat", *["torus2d"] * has_torus, *["tree"] * several]


def half_seconds(cluster: Cluster, topology: str, num_bytes: float, codec: str = "none") -> float:
    """Returns the seconds of a half of an all-reduce: as measured in a topology, or by the cost of a message.

    With a ``codec`` they are those of ``topology="auto"``, and ``num_bytes`` those before encoding.
    """
    link, world_size = cluster.halves, cluster.world_size
    if codec != "none":
        return cluster.all_reduces[codec].reduce_scatter(num_bytes, world_size)
    if topology == "torus2d":
        if cluster.torus is not None:
            return cluster.torus.reduce_scatter(num_bytes, world_size)
        torus = Torus(world_size, cluster.torus_columns)
        return link.torus_half(num_bytes, torus.columns, torus.rows)
    if topology == "tree":
        if cluster.tree is not None:
            return cluster.tree.reduce_scatter(num_bytes, world_size)
        half = math.ceil(num_bytes / 2)
        return link.tree_half(num_bytes, world_size, pieces=max(1, half / piece_bytes(half, world_size)))
    return link.reduce_scatter(num_bytes, world_size)


def step_seconds(
    profile: Profile,
    cluster: Cluster,
    topology: str = "flat",
    codec: str = "none",
    low_rank: int | None = None,
    fusion: Fusion | None = None,
) -> float:
    """Returns the seconds of a step, by simulation of its :func:`schedule`."""
    buckets, _, early = schedule(profile, cluster, topology, codec, low_rank, fusion)
    return simulate_step(buckets, profile.forward, profile.backward, early).seconds + profile.update


def schedule(
    profile: Profile,
    cluster: Cluster,
    topology: str = "flat",
    codec: str = "none",
    low_rank: int | None = None,
    fusion: Fusion | None = None,
) -> tuple[list[BucketTimes], list[int], EarlyGathers]:
    """Returns the times of buckets, their bytes, and the all-gathers that start early.

    Args:
        profile: a step without communication.
        low_rank: the rank of factors, in turns P and Q, whose whole all-reduce runs under the backward pass.
        fusion: None: buckets as DeAR would choose them.
    """
    half = partial(half_seconds, cluster, topology, codec=codec)
    # Tensors without memory, of so many bytes, in the order in which their gradients become ready.
    tensors = [torch.empty(tensor.num_bytes, dtype=torch.uint8, device="meta") for tensor in profile.tensors]
    parameters = [NamedParameter(str(i), tensor, str(i), (0, 0)) for i, tensor in enumerate(tensors)]
    of_id = {id(tensor): times for tensor, times in zip(tensors, profile.tensors, strict=True)}

    def halves(members: Sequence[NamedParameter]) -> tuple[float, float]:
        layers = [of_id[id(member.tensor)] for member in members]
        if low_rank is None:
            return (half(sum(layer.num_bytes for layer in layers)),) * 2
        return 2 * half(sum(_factor_bytes(layer, low_rank) for layer in layers)), 0.0

    ready, needed = ({key: getattr(of_id[key], name) for key in of_id} for name in ("ready", "needed"))
    step = MeasuredStep(
        parameters,
        ready,
        needed,
        halves,
        latency=half(0),
        early=codec == "none" and low_rank is None,
        divisible=topology != "torus2d",
    )
    layout = plan_buckets(parameters, fusion or step.candidates(COSTS[:1])[0])
    buckets = step.buckets(layout)
    return buckets, [sum(map(num_bytes, members)) for members in layout], step.early_gathers(buckets)


def _factor_bytes(layer: LayerTimes, rank: int) -> float:
    shape = torch.Size(layer.shape)
    return factor_bytes(shape, layer.num_bytes // max(1, shape.numel()), rank)


@torch.no_grad()
def measure_products(gradients: Sequence[Tensor], rank: int) -> float:
    """Returns the seconds of a step in which a rank makes factors of its gradients, and multiplies their averages.

    It takes the memory of one gradient more and its residual at a time.

    Args:
        gradients: which stay as they are.
    """
    seconds = 0.0
    for gradient in gradients:
        if not is_factorized(gradient.shape, rank):
            continue
        factorized, into, clock = FactorizedGradient(gradient, rank, True), gradient.clone(), Clock(gradient.device)
        parts = [torch.empty_like(factor) for factor in factorized.factors]
        moments = [clock.now()]
        for _ in range(REPEATS):
            part = parts[factorized.side]
            factorized.add(gradient)
            factorized.take_factor(orthonormal=True)
            factorized.project(part)
            factorized.subtract(part)
            factorized.receive(part)
            factorized.approximate(into)
            moments.append(clock.now())
        seconds += median(clock.seconds_between(*pair) for pair in pairwise(moments))
    return seconds
