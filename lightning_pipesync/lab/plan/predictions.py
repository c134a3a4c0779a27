"""What a step takes with DDP and with each registered method, from measured costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from lightning_pipesync.core.cluster import Cluster
from lightning_pipesync.core.cost import LinkCost
from lightning_pipesync.core.work import DEFAULT_MB, Work
from lightning_pipesync.lab.bench.method_candidate import lab_of
from lightning_pipesync.lab.bench.step import predict_ddp
from lightning_pipesync.methods.laboratory import Prediction, waiting_share
from lightning_pipesync.training.registry import METHODS

#: A bucket size of DDP that is slower by this share of a step at most is as fast.
AS_FAST = 0.01

#: Maximum number of batches to accumulate: a batch that is larger by more than that is no way out.
MOST_ACCUMULATED = 64

#: A method hardly waits that waits for the network for this share of a step at most.
LITTLE = 0.05


def predict(work: Work, cluster: Cluster) -> list[Prediction]:
    """Returns a prediction for each method, with the settings that :func:`_chosen` picks."""
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


def _chosen(group: Sequence[Prediction], work: Work) -> Prediction:
    """Returns the fastest of an exact method; of another the first that hardly waits, or else the fastest.

    Of DDP's buckets that are as fast it is the largest, which needs fewer messages; larger ones of a method are run if
    it says so.
    """
    fastest = min(group, key=lambda one: one.seconds)
    if fastest.method == "ddp":
        as_fast = (one for one in group if one.seconds * (1 - AS_FAST) <= fastest.seconds)
        return max(as_fast, key=lambda one: one.settings["bucket_mb"])
    hardly_wait = (one for one in group if one.seconds * (1 - LITTLE) <= work.seconds_with(one.method))
    return fastest if fastest.exact else next(hardly_wait, fastest)


def _groups(work: Work, cluster: Cluster) -> Iterator[list[Prediction]]:
    """Yields groups of settings of each of which one is chosen, see :meth:`LabEntry.predict`; DDP's come first.

    Those that the method refuses for this model are left out.
    """
    ddp = [_ddp_in(work, cluster, size) for size in work.bucket_sizes()]
    groups = [ddp]
    if _chosen(ddp, work).settings["bucket_mb"] != DEFAULT_MB:
        groups.append([one for one in ddp if one.settings["bucket_mb"] == DEFAULT_MB])
    for name in METHODS:
        groups += lab_of(name).predict(work, cluster)
    for group in groups:
        if allowed := [one for one in group if one.name not in work.refused]:
            yield allowed


def _ddp_in(work: Work, cluster: Cluster, bucket_mb: float) -> Prediction:
    seconds = predict_ddp(work.profile_with("ddp"), cluster.backend, cluster.world_size, bucket_mb)
    return Prediction("ddp", {"bucket_mb": bucket_mb}, seconds, why=waiting_share(work.seconds_with("ddp"), seconds))


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
    return min(predict_ddp(work.profile_with("ddp"), backend, world_size, size) for size in work.bucket_sizes())


def _first(holds: Callable[[float], bool], low: float, high: float, steps: int = 30) -> float | None:
    """Returns 10 to the least exponent at which a condition holds that holds from there on; None: it never does."""
    if not holds(high):
        return None
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return math.pow(10, high)
