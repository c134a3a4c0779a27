"""What a step takes with each method: simulations of their schedules, from measured costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_pipesync.bench.profile import Profile
from lightning_pipesync.bench.step import predict_ddp
from lightning_pipesync.core.buckets import Fusion, num_bytes, plan_buckets
from lightning_pipesync.core.cost import LinkCost
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.core.schedule import BucketTimes, simulate_step
from lightning_pipesync.core.torus import Torus
from lightning_pipesync.methods.dear.eager import plan_early_gathers
from lightning_pipesync.plan.cluster import Cluster
from lightning_pipesync.plan.work import Work

#: Bucket sizes of DDP and DeAR that are tried, in MiB; the default is among them.
BUCKET_MB = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 25.0, 50.0)

#: The settings of an outer step that suit short periods, see docs/local_sgd.md.
_OUTER = {"outer_optimizer": "nesterov", "outer_lr": 1.0, "outer_momentum": 0.3}

#: Settings that are the same wherever they are tried.
UNSHOWN = ("fusion", *_OUTER)

#: Settings of local SGD that are tried.
LOCAL_SGD: tuple[dict[str, Any], ...] = (
    {"period": 16, **_OUTER},
    {"period": 16, **_OUTER, "compression": "int8"},
    {"period": 16, **_OUTER, "compression": "int8", "fragments": 4, "overlap_steps": 4},
    {"period": 64, **_OUTER},
    {"period": 64, **_OUTER, "compression": "int4"},
)

#: The share of local steps of SelSync.
LSSR = 0.75


@dataclass(frozen=True)
class Prediction:
    """What a step is expected to take.

    Attributes:
        method: the strategy's name.
        settings: those that differ from the method's defaults.
        seconds: of a step, on average.
        error: half the difference that the standard errors of the measured costs make, in seconds.
        exact: whether the training is that of DDP, bit for bit but for the order of sums.
        why: what the time consists of, or what is known of its quality.
    """

    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    error: float = 0.0
    exact: bool = True
    why: str = ""

    @property
    def name(self) -> str:
        """Method and settings, as ``pipesync bench`` takes them."""
        settings = ",".join(f"{name}={value}" for name, value in self.settings.items())
        return f"{self.method}:{settings}" if settings else self.method

    @property
    def label(self) -> str:
        """Method and the settings that distinguish it, for a table."""
        shown = [
            f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in self.settings.items()
            if name not in UNSHOWN
        ]
        return " ".join([self.method, *shown])


def predict(work: Work, cluster: Cluster) -> list[Prediction]:
    """Returns a prediction for each method with its best settings, or with some that are known to train well.

    Args:
        work: a step without communication.
        cluster: the costs of communication.
    """
    low, high = ({one.name: one.seconds for one in _predictions(work, cluster.with_errors(sign))} for sign in (-1, 1))
    every = list(_predictions(work, cluster))
    found = [
        Prediction(one.method, one.settings, one.seconds, (high[one.name] - low[one.name]) / 2, one.exact, one.why)
        for one in every
    ]
    searched = {"ddp", "dear"}  # the others' settings matter for what is trained
    best = {name: min((one for one in found if one.method == name), key=lambda one: one.seconds) for name in searched}
    return [one for one in found if one.method not in searched or one is best[one.method]]


def fastest(work: Work, cluster: Cluster) -> dict[str, float]:
    """Returns by method the seconds of a step with its fastest settings."""
    seconds: dict[str, float] = {}
    for one in _predictions(work, cluster):
        seconds[one.method] = min(one.seconds, seconds.get(one.method, math.inf))
    return seconds


def _predictions(work: Work, cluster: Cluster) -> Iterator[Prediction]:
    """Yields the prediction of each method with each of its settings."""
    compute, world_size = work.seconds, cluster.world_size
    total = sum(tensor.num_bytes for tensor in work.profile.tensors)
    all_reduce = {codec: cost.all_reduce(total, world_size) for codec, cost in cluster.all_reduces.items()}
    for size in BUCKET_MB:
        seconds = predict_ddp(work.profile, cluster.backend, world_size, size)
        yield Prediction("ddp", {"bucket_mb": size}, seconds, exact=True, why=_waits(compute, seconds))
    for topology in (None, *_tori(world_size)):
        for size in BUCKET_MB:
            seconds = dear_step(work.profile, cluster, size, topology)
            settings: dict[str, Any] = {"fusion": "buffer", "bucket_mb": size}
            settings |= {} if topology is None else {"topology": "torus2d"}
            yield Prediction("dear", settings, seconds, exact=True, why=_waits(compute, seconds))
    for codec in all_reduce:
        late = "one step late, at predicted weights"
        seconds = max(compute + work.prediction, all_reduce[codec])
        yield Prediction("pipe_sgd", _codec(codec), seconds, exact=False, why=late)
    yield Prediction(
        "selsync",
        {"lssr": LSSR, "outer_momentum": 0.3},
        compute + (1 - LSSR) * all_reduce["none"],
        exact=False,
        why=f"{LSSR:.0%} of the steps are local",
    )
    for settings in LOCAL_SGD:
        codec = settings.get("compression", "none")
        if codec in all_reduce:
            seconds = _local_sgd(compute, all_reduce[codec], settings)
            yield Prediction(
                "local_sgd", settings, seconds, exact=False, why=f"averages every {settings['period']} steps"
            )
    yield Prediction(
        "parameter_server",
        {"partition": "handed_out"},
        compute * work.own_pace + cluster.halves.sharded_servers(total, world_size),
        exact=False,
        why="stale; nobody waits for a slow rank",
    )


def _codec(codec: str) -> dict[str, Any]:
    return {} if codec == "none" else {"compression": codec}


def _waits(compute: float, seconds: float) -> str:
    return f"{1 - compute / seconds:.0%} of a step waits for the network"


def _tori(world_size: int) -> list[Torus]:
    """Returns the torus that DeAR makes of so many ranks, if they are enough for one that is not flat."""
    try:
        return [Torus(world_size, columns=None)]
    except ValueError:
        return []


def dear_step(
    profile: Profile, cluster: Cluster, bucket_mb: float, torus: Torus | None = None, eager: bool = True
) -> float:
    """Returns the seconds of a step of DeAR.

    Args:
        profile: a step without communication.
        cluster: the costs of communication.
        bucket_mb: size of the buckets, in MiB.
        torus: the ranks in rows and columns; None: in a ring.
        eager: whether buckets are gathered early, as DeAR would plan it; not on a torus.
    """
    # Tensors without memory, of so many bytes, in the order in which their gradients become ready.
    tensors = [torch.empty(tensor.num_bytes, dtype=torch.uint8, device="meta") for tensor in profile.tensors]
    parameters = [NamedParameter(str(i), tensor, str(i), (0, 0)) for i, tensor in enumerate(tensors)]
    link, world_size = cluster.halves, cluster.world_size

    def half(num_bytes: float) -> float:
        if torus is None:
            return link.reduce_scatter(num_bytes, world_size)
        return link.torus_half(num_bytes, torus.columns, torus.rows)

    buckets = []
    for members in plan_buckets(parameters, Fusion(bucket_mb=bucket_mb)):
        times = [profile.tensors[int(member.name)] for member in members]
        size = sum(map(num_bytes, members))
        buckets.append(
            BucketTimes(
                ready=max(one.ready for one in times),
                needed=min(one.needed for one in times),
                reduce_scatter=half(size),
                all_gather=half(size),
                latency=half(0),
            )
        )
    early = plan_early_gathers(buckets) if eager and torus is None else None
    return simulate_step(buckets, profile.forward, profile.backward, early).seconds + profile.update


def _local_sgd(compute: float, all_reduce: float, settings: Mapping[str, Any]) -> float:
    """Returns the seconds of a step of local SGD, on average over a period.

    The average of a fragment runs under ``overlap_steps`` steps, and what is left of it is waited for.
    """
    period, fragments, overlap = settings["period"], settings.get("fragments", 1), settings.get("overlap_steps", 0)
    waited = max(0.0, all_reduce / fragments - overlap * compute) * fragments
    return max(compute + waited / period, all_reduce / period)


def enough_bandwidth(work: Work, cluster: Cluster, share: float = 0.05) -> float | None:
    """Returns the bytes per second from which on DDP waits for the network for ``share`` of a step at most.

    None: it waits for longer at any bandwidth, because of latency or of what processors do.
    """

    def waits(bandwidth: float) -> bool:
        backend = cluster.with_bandwidth(bandwidth).backend
        return _ddp(work, backend, cluster.world_size) * (1 - share) > work.seconds

    return _first(lambda exponent: not waits(10**exponent), 4.0, 13.0)


def enough_accumulation(work: Work, cluster: Cluster, share: float = 0.05) -> int | None:
    """Returns the batches to accumulate with which DDP waits for the network for ``share`` of a step at most.

    A power of 2, at most 1024; None: that is not enough.
    """
    compute = work.profile.forward + work.profile.backward
    ddp = _ddp(work, cluster.backend, cluster.world_size)
    for batches in (2**exponent for exponent in range(11)):
        whole = (batches - 1) * compute
        if (whole + ddp) * (1 - share) <= whole + work.seconds:
            return batches
    return None


def _ddp(work: Work, backend: LinkCost, world_size: int) -> float:
    """Returns the seconds of a step of DDP with its best buckets."""
    return min(predict_ddp(work.profile, backend, world_size, size) for size in BUCKET_MB)


def _first(holds: Callable[[float], bool], low: float, high: float, steps: int = 30) -> float | None:
    """Returns 10 to the least exponent at which a condition holds that holds from there on; None: it never does."""
    if not holds(high):
        return None
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return math.pow(10, high)
