"""What a step takes with the baseline, DDP or HSDP, and with each registered method, from measured costs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from lightning_pipesync.lab.predictions.cluster import Cluster
from lightning_pipesync.lab.predictions.entry import Prediction, waiting_share
from lightning_pipesync.lab.predictions.registry import lab_of
from lightning_pipesync.lab.predictions.work import DEFAULT_MB, Work, predict_ddp
from lightning_pipesync.training.registry import METHODS

#: What methods are compared with: DDP, and FSDP2 on a mesh of two dimensions where it shards replicas.
BASELINES = ("ddp", "hsdp")

#: A bucket size of DDP that is slower by this share of a step at most is as fast.
AS_FAST = 0.01

#: Maximum number of batches to accumulate: a batch that is larger by more than that is no way out.
MOST_ACCUMULATED = 64

#: A method hardly waits that waits for the network for this share of a step at most.
LITTLE = 0.05


def is_baseline(prediction: Prediction) -> bool:
    return prediction.method in BASELINES


def baseline_of(cluster: Cluster) -> str:
    """Returns the name of what methods are compared with on such hosts."""
    return BASELINES[cluster.ranks_per_replica > 1]


def predict(work: Work, cluster: Cluster) -> list[Prediction]:
    """Returns a prediction for each method, with the settings that :func:`_chosen` picks."""
    low, high = (
        {one.name: one.seconds for group in groups_of(work, cluster.with_errors(sign)) for one in group}
        for sign in (-1, 1)
    )
    found = [_chosen(group, work) for group in groups_of(work, cluster)]
    return [replace(one, error=(high[one.name] - low[one.name]) / 2) for one in found]


def fastest(work: Work, cluster: Cluster) -> dict[str, float]:
    """Returns by title the seconds of a step, with the faster of the settings that are chosen."""
    seconds: dict[str, float] = {}
    for one in (_chosen(group, work) for group in groups_of(work, cluster)):
        seconds[one.title] = min(one.seconds, seconds.get(one.title, math.inf))
    return seconds


def considered(work: Work, cluster: Cluster) -> list[Prediction]:
    """Returns what :func:`predict` does, and the exact methods with all settings from which it picks."""
    groups = groups_of(work, cluster)
    found = [one for group in groups for one in (group if group[0].exact else [_chosen(group, work)])]
    return list({one.name: one for one in found}.values())


def _chosen(group: Sequence[Prediction], work: Work) -> Prediction:
    """Returns the fastest of one training; of several the first that hardly waits, or else the fastest.

    Of DDP's buckets that are as fast it is the largest, which needs fewer messages; larger ones of a method are run if
    it says so.
    """
    fastest = min(group, key=lambda one: one.seconds)
    if fastest.method == "ddp":
        as_fast = (one for one in group if one.seconds * (1 - AS_FAST) <= fastest.seconds)
        return max(as_fast, key=lambda one: one.settings["bucket_mb"])
    if fastest.exact or fastest.variant:
        return fastest
    hardly_wait = (one for one in group if one.seconds * (1 - LITTLE) <= work.seconds_with(one.method))
    return next(hardly_wait, fastest)


def groups_of(work: Work, cluster: Cluster) -> Iterator[list[Prediction]]:
    """Yields groups of settings of each of which one is chosen, see :meth:`LabEntry.predict`; the baseline's first.

    Those that the method refuses for this model are left out.
    """
    groups = [_of_baseline(work, cluster)]
    if cluster.ranks_per_replica == 1 and _chosen(groups[0], work).settings["bucket_mb"] != DEFAULT_MB:
        groups.append([one for one in groups[0] if one.settings["bucket_mb"] == DEFAULT_MB])
    for name in METHODS:
        groups += lab_of(name).predict(work, cluster)
    for group in groups:
        if allowed := [one for one in group if one.name not in work.refused]:
            yield allowed


def predict_hsdp(work: Work, cluster: Cluster) -> float:
    """Returns the predicted seconds of a step of FSDP2 on both dimensions, with an all-reduce of each of its groups."""
    durations = [cluster.backend.all_reduce(num_bytes, cluster.world_size) for num_bytes in work.groups]
    if not cluster.hsdp_overlaps:
        return work.seconds + sum(durations)
    ready, filled, tensors = [], 0, iter(work.profile.tensors)
    for group in accumulate(work.groups):  # its gradients are ready once those before them and its own are
        moment = 0.0
        while filled < group and (tensor := next(tensors, None)) is not None:
            filled, moment = filled + tensor.num_bytes, tensor.ready
        ready.append(moment)
    return work.profile.seconds_with_all_reduces(ready, durations)


def _of_baseline(work: Work, cluster: Cluster) -> list[Prediction]:
    """Returns HSDP, or DDP with each size of buckets."""
    if cluster.ranks_per_replica > 1:
        seconds = predict_hsdp(work, cluster)
        return [Prediction("hsdp", {}, seconds, why=waiting_share(work.seconds, seconds))]
    profile, computation, found = work.profile_with("ddp"), work.seconds_with("ddp"), []
    for size in work.bucket_sizes():
        seconds = predict_ddp(profile, cluster.backend, cluster.world_size, size)
        found.append(Prediction("ddp", {"bucket_mb": size}, seconds, why=waiting_share(computation, seconds)))
    return found


def enough_bandwidth(work: Work, cluster: Cluster) -> float | None:
    """Returns the bytes per second from which on the baseline waits for the network for 5 % of a step at most.

    They are a host's. None: it waits for longer at any bandwidth, because of latency or of what processors do.
    """
    computation = work.seconds_with(baseline_of(cluster))

    def waits(exponent: float) -> bool:
        return _baseline(work, cluster.with_bandwidth(10**exponent)) * (1 - LITTLE) > computation

    low, high = 4.0, 13.0
    if waits(high):
        return None
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if waits(middle) else (low, middle)
    return math.pow(10, high)


def enough_accumulation(work: Work, cluster: Cluster) -> int | None:
    """Returns the batches to accumulate with which the baseline waits for the network for 5 % of a step at most.

    A power of 2, at most :data:`MOST_ACCUMULATED`; None: that is not enough.
    """
    compute = work.profile.forward + work.profile.backward
    whole_step, computation = _baseline(work, cluster), work.seconds_with(baseline_of(cluster))
    for batches in (2**exponent for exponent in range(MOST_ACCUMULATED.bit_length())):
        whole = (batches - 1) * compute
        if (whole + whole_step) * (1 - LITTLE) <= whole + computation:
            return batches
    return None


def _baseline(work: Work, cluster: Cluster) -> float:
    """Returns the seconds of a step of HSDP, or of DDP with its best buckets."""
    return min(one.seconds for one in _of_baseline(work, cluster))
