"""What a step takes with each method: simulations of their schedules, from measured costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.core.comm.torus import Torus
from lightning_pipesync.core.cost import LinkCost
from lightning_pipesync.lab.bench.step import predict_ddp
from lightning_pipesync.lab.plan.cluster import Cluster
from lightning_pipesync.lab.plan.schedules import dear_step, local_sgd_step, pipeline_step
from lightning_pipesync.lab.plan.work import Work

#: The most buckets of DDP and DeAR that are tried, and DDP's default size, in MiB, with which DDP is run, too.
MOST_BUCKETS, DEFAULT_MB = 40, 25.0

#: A bucket size of DDP that is slower by this share of a step at most is as fast.
AS_FAST = 0.01

#: DeAR is also predicted, and run, with buckets that are so many times as large as the best: where messages cost more
#: than was measured, as on busy processors, fewer are better.
LARGER = 4

#: The settings of an outer step that suit short periods, see docs/local_sgd.md.
OUTER = {"outer_optimizer": "nesterov", "outer_lr": 1.0, "outer_momentum": 0.3}

#: Local SGD with and without codecs and averages under computation, each with the shortest period that hardly waits.
LOCAL_SGD: tuple[dict[str, Any], ...] = (
    OUTER,
    {**OUTER, "compression": "int8"},
    {**OUTER, "compression": "int8", "fragments": 4, "overlap_steps": 4},
    {**OUTER, "compression": "int4"},
)

#: Its periods that are tried.
PERIODS = (4, 8, 16, 32, 64)

#: The shares of local steps of SelSync that are tried.
LSSR = (0.5, 0.75, 0.9)

#: The most batches to accumulate: a batch that is larger by more than that is no way out.
MOST_ACCUMULATED = 64

#: A method hardly waits that waits for the network for this share of a step at most.
LITTLE = 0.05


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
    def shown_settings(self) -> str:
        """The settings, for a table."""
        return ", ".join(
            f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in self.settings.items()
        )


def predict(work: Work, cluster: Cluster) -> list[Prediction]:
    """Returns a prediction for each method, with the settings that :func:`_chosen` picks.

    Args:
        work: a step without communication.
        cluster: the costs of communication.
    """
    low, high = (
        {one.name: one.seconds for group in _groups(work, cluster.with_errors(sign)) for one in group}
        for sign in (-1, 1)
    )
    found = [_chosen(group, work) for group in _groups(work, cluster)]
    return [replace(one, error=(high[one.name] - low[one.name]) / 2) for one in found]


def fastest(work: Work, cluster: Cluster) -> dict[str, float]:
    """Returns by method the seconds of a step, with the faster of the settings that are chosen."""
    seconds: dict[str, float] = {}
    for one in (_chosen(group, work) for group in _groups(work, cluster)):
        seconds[one.method] = min(one.seconds, seconds.get(one.method, math.inf))
    return seconds


def considered(work: Work, cluster: Cluster) -> list[Prediction]:
    """Returns what :func:`predict` does, and the exact methods with all settings from which it picks."""
    groups = _groups(work, cluster)
    found = [one for group in groups for one in (group if group[0].exact else [_chosen(group, work)])]
    return list({one.name: one for one in found}.values())


def bucket_sizes(work: Work) -> list[float]:
    """Returns the bucket sizes that are tried, in MiB, ascending: powers of two, and DDP's default.

    They give from :data:`MOST_BUCKETS` buckets to one.
    """
    total = sum(tensor.num_bytes for tensor in work.profile.tensors) / MIB
    largest = total if total <= DEFAULT_MB else 2 * total  # otherwise the default holds all
    powers = (2.0**exponent for exponent in range(-6, 20))
    return sorted({DEFAULT_MB, *(size for size in powers if total / MOST_BUCKETS <= size < largest)})


def _chosen(group: Sequence[Prediction], work: Work) -> Prediction:
    """Returns the fastest of an exact method; of another the first that hardly waits, or else the fastest.

    Of DDP's buckets that are as fast it is the largest, which needs fewer messages; larger ones of DeAR are run anyway.
    """
    fastest = min(group, key=lambda one: one.seconds)
    if fastest.method == "ddp":
        as_fast = (one for one in group if one.seconds * (1 - AS_FAST) <= fastest.seconds)
        return max(as_fast, key=lambda one: one.settings["bucket_mb"])
    hardly_wait = (one for one in group if one.seconds * (1 - LITTLE) <= work.seconds_with(one.method))
    return fastest if fastest.exact else next(hardly_wait, fastest)


def _groups(work: Work, cluster: Cluster) -> Iterator[list[Prediction]]:
    """Yields settings of a method of which one is to be chosen; of what is not exact, those that train best first.

    Those that the method refuses for this model are left out.
    """
    for group in _all_groups(work, cluster):
        if allowed := [one for one in group if one.name not in work.refused]:
            yield allowed


def _all_groups(work: Work, cluster: Cluster) -> Iterator[list[Prediction]]:
    compute, world_size = work.seconds, cluster.world_size
    total = sum(tensor.num_bytes for tensor in work.profile.tensors)
    all_reduce = {codec: cost.all_reduce(total, world_size) for codec, cost in cluster.all_reduces.items()}
    average = {codec: cost.all_reduce(total, world_size) for codec, cost in cluster.averages.items()}
    sizes = bucket_sizes(work)
    ddp = [_ddp_in(work, cluster, size) for size in sizes]
    yield ddp
    if _chosen(ddp, work).settings["bucket_mb"] != DEFAULT_MB:
        yield [one for one in ddp if one.settings["bucket_mb"] == DEFAULT_MB]
    dear = [_dear(work, cluster, size, topology) for topology in (None, *tori(world_size)) for size in sizes]
    yield dear
    best = _chosen(dear, work).settings["bucket_mb"]
    if larger := [one for one in dear if one.settings["bucket_mb"] >= LARGER * best]:
        yield larger
    late = "one step late, at predicted weights"
    yield [
        Prediction(
            "pipe_sgd",
            _codec(codec),
            max(work.seconds_with("pipe_sgd"), seconds),
            exact=False,
            why=late,
        )
        for codec, seconds in all_reduce.items()
    ]
    yield [
        Prediction(
            "selsync",
            {"lssr": lssr, "outer_momentum": 0.3},
            work.seconds_with("selsync") + (1 - lssr) * average["none"],
            exact=False,
            why=f"{lssr:.0%} of the steps are local",
        )
        for lssr in LSSR
    ]
    for variant in LOCAL_SGD:
        codec = variant.get("compression", "none")
        if codec in average:
            own = work.seconds_with("local_sgd")
            wire = cluster.seconds_on_wire(total, codec)
            yield [_local_sgd(own, average[codec], wire, {"period": period, **variant}) for period in PERIODS]
    servers = cluster.servers.sharded_servers(total, world_size)
    yield [
        Prediction(
            "parameter_server",
            {"partition": "work_queue"},
            compute * work.own_pace + servers,
            exact=False,
            why="stale; nobody waits for a slow rank",
        )
    ]
    if len(work.layers) >= world_size:
        seconds = pipeline_step(work, cluster.bandwidth, world_size)
        late = f"{world_size} mini-batches in stages, up to {world_size - 1} steps late"
        yield [Prediction("ea_pipe", {}, seconds, exact=False, why=late)]


def _ddp_in(work: Work, cluster: Cluster, bucket_mb: float) -> Prediction:
    seconds = predict_ddp(work.profile_with("ddp"), cluster.backend, cluster.world_size, bucket_mb)
    return Prediction("ddp", {"bucket_mb": bucket_mb}, seconds, why=_waits(work.seconds_with("ddp"), seconds))


def _dear(work: Work, cluster: Cluster, bucket_mb: float, topology: Torus | None) -> Prediction:
    seconds = dear_step(work.profile_with("dear"), cluster, bucket_mb, topology)
    settings: dict[str, Any] = {"fusion": "buffer", "bucket_mb": bucket_mb}
    settings |= {} if topology is None else {"topology": "torus2d"}
    return Prediction("dear", settings, seconds, why=_waits(work.seconds_with("dear"), seconds))


def _local_sgd(compute: float, average: float, on_wire: float, settings: Mapping[str, Any]) -> Prediction:
    seconds = local_sgd_step(compute, average, on_wire, settings)
    return Prediction("local_sgd", settings, seconds, exact=False, why=f"averages every {settings['period']} steps")


def _codec(codec: str) -> dict[str, Any]:
    return {} if codec == "none" else {"compression": codec}


def _waits(compute: float, seconds: float) -> str:
    return f"{1 - compute / seconds:.0%} of a step waits for the network"


def tori(world_size: int) -> list[Torus]:
    """Returns the torus that DeAR makes of so many ranks, if they are enough for one that is not flat."""
    try:
        return [Torus(world_size, columns=None)]
    except ValueError:
        return []


def enough_bandwidth(work: Work, cluster: Cluster, share: float = LITTLE) -> float | None:
    """Returns the bytes per second from which on DDP waits for the network for ``share`` of a step at most.

    None: it waits for longer at any bandwidth, because of latency or of what processors do.
    """

    def waits(bandwidth: float) -> bool:
        backend = cluster.with_bandwidth(bandwidth).backend
        return _ddp(work, backend, cluster.world_size) * (1 - share) > work.seconds_with("ddp")

    return _first(lambda exponent: not waits(10**exponent), 4.0, 13.0)


def enough_accumulation(work: Work, cluster: Cluster, share: float = LITTLE) -> int | None:
    """Returns the batches to accumulate with which DDP waits for the network for ``share`` of a step at most.

    A power of 2, at most :data:`MOST_ACCUMULATED`; None: that is not enough.
    """
    compute = work.profile.forward + work.profile.backward
    ddp = _ddp(work, cluster.backend, cluster.world_size)
    for batches in (2**exponent for exponent in range(MOST_ACCUMULATED.bit_length())):
        whole = (batches - 1) * compute
        if (whole + ddp) * (1 - share) <= whole + work.seconds_with("ddp"):
            return batches
    return None


def _ddp(work: Work, backend: LinkCost, world_size: int) -> float:
    """Returns the seconds of a step of DDP with its best buckets."""
    return min(predict_ddp(work.profile_with("ddp"), backend, world_size, size) for size in bucket_sizes(work))


def _first(holds: Callable[[float], bool], low: float, high: float, steps: int = 30) -> float | None:
    """Returns 10 to the least exponent at which a condition holds that holds from there on; None: it never does."""
    if not holds(high):
        return None
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return math.pow(10, high)
