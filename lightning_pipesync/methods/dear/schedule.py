"""The schedule of a step: its buckets, and the all-gathers that start under backward while no reduce-scatter is ready.

In the paper no all-gather starts before the last reduce-scatter has ended: a step takes ``max(t_ff, t_ag) + max(t_bp,
t_rs)`` (DeAR, Eq. 7). Where reduce-scatters take less time than backward, the network idles under backward, and forward
may wait for all-gathers that could have run then. An averaged gradient can be gathered as soon as it is reduced; what
is not gathered by the end of backward is gathered under the next forward. A large bucket is gathered in pieces, so that
a reduce-scatter that becomes ready waits for one piece at most.

[Note: sizes without a search]
Small buckets overlap more, and each costs the latency of two collectives. What nothing hides are the first and the last
bucket: the last gradient is ready when backward ends, and its weights are needed when forward begins. So buckets are
small at both ends, and grow towards the middle. Which sizes are best follows from a simulation of the step. It does not
know what a bucket costs besides: copies, hooks, threads that wait for a processor. So some more costs of a bucket are
simulated, and a few steps with each of the sizes tell which are best.

[Note: one schedule on all ranks]
Whether a reduce-scatter is ready differs from rank to rank and from step to step, and all ranks must issue the same
operations in the same order. So rank 0 decides in advance, from the times of its first steps and the cost of the
network, what the buckets are, and which all-gathers follow which reduce-scatter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import NamedTuple

from lightning_pipesync.core.buckets import MIB, MOST_BUCKETS, Fusion, num_bytes, plan_buckets
from lightning_pipesync.core.parameters import NamedParameter

#: Candidates: the least share of a piece that is gathered before the next reduce-scatter is ready.
SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)

#: Candidates: maximum time of a piece, as a share of backward; and maximum number of pieces of a bucket.
LONGEST, MOST_PIECES = (math.inf, 0.2, 0.05), 16

#: The least gain, as a share of a step, for which all-gathers start early.
LEAST_GAIN = 0.005

#: How many times as slow as measured the network may be: a schedule that serves one of them only would often lose.
NETWORKS = (0.8, 1.0, 1.25)

#: Candidates: how many times the buckets at both ends are halved.
HALVINGS = (0, 1, 2, 3, 4)

#: How many times its latency a bucket may cost.
COSTS = (1.0, 3.0, 9.0)

#: Buckets with which a step takes longer by this share at most are as good: the fewest of these are taken, as each
#: takes processor time, too.
AS_GOOD = 0.002


@dataclass(frozen=True)
class BucketTimes:
    """The times of a bucket, in seconds."""

    ready: float  # when its gradients are ready, since backward began
    needed: float  # after how much computation of the forward pass its weights are needed
    reduce_scatter: float
    all_gather: float
    latency: float = 0.0  # the part of the all-gather's duration that does not depend on the size

    def on(self, network: float) -> BucketTimes:
        """Returns the times on a network that is ``network`` times as slow."""
        return replace(
            self,
            reduce_scatter=network * self.reduce_scatter,
            all_gather=network * self.all_gather,
            latency=network * self.latency,
        )

    def with_latency(self, latency: float) -> BucketTimes:
        """Returns the times with another latency."""
        more = latency - self.latency
        return replace(
            self, reduce_scatter=self.reduce_scatter + more, all_gather=self.all_gather + more, latency=latency
        )

    def gather(self, share: float) -> float:
        """Returns the duration of the all-gather of a share of the bucket."""
        return self.latency + share * (self.all_gather - self.latency)


@dataclass(frozen=True)
class EarlyGathers:
    """All-gathers that run under backward; what they leave is gathered under the next forward pass."""

    pieces: Sequence[int]  # the number of equal pieces of each bucket
    after: Sequence[Sequence[int]]  # for each bucket those of which it gathers one more piece after its reduce-scatter

    @classmethod
    def none(cls, num_buckets: int) -> EarlyGathers:
        return cls([1] * num_buckets, [[]] * num_buckets)


class SimulatedStep(NamedTuple):
    """A backward pass and the forward pass that follows it."""

    operations: list[tuple[str, int, float]]  # in the order in which they run: kind, bucket, start in seconds
    seconds: float  # when the forward pass ends, since backward began


def simulate_step(
    buckets: Sequence[BucketTimes], forward: float, backward: float, early: EarlyGathers | None = None
) -> SimulatedStep:
    """Simulates a step whose operations run one after the other, all ranks alike.

    Reduce-scatters run under backward, each once its bucket is ready, in the order of the buckets. After the last one
    and the end of backward the all-gathers run in the order in which forward needs the weights, and forward waits for
    the weights where it needs them (DeAR, Section III-B).

    Args:
        buckets: in the order of their reduce-scatters.
        forward: seconds of the forward pass without waiting.
        backward: seconds of the backward pass.
        early: None: no all-gathers under backward, as in the paper.
    """
    early = early or EarlyGathers.none(len(buckets))
    operations: list[tuple[str, int, float]] = []
    gathered = [0.0] * len(buckets)  # when the weights of a bucket, or of its first pieces, are there
    left = list(early.pieces)
    free = 0.0  # when the network is

    def run(kind: str, bucket: int, earliest: float, duration: float) -> float:
        nonlocal free
        start = max(free, earliest)
        operations.append((kind, bucket, start))
        free = start + duration
        return free

    for index, bucket in enumerate(buckets):
        run("reduce_scatter", index, bucket.ready, bucket.reduce_scatter)
        for other in early.after[index]:
            gathered[other] = run("all_gather", other, 0.0, buckets[other].gather(1 / early.pieces[other]))
            left[other] -= 1
    forward_begins = max(backward, free)
    in_order = sorted(range(len(buckets)), key=lambda index: buckets[index].needed)
    waited = 0.0
    for index in in_order:
        if left[index]:
            rest = buckets[index].gather(left[index] / early.pieces[index])
            gathered[index] = run("all_gather", index, forward_begins, rest)
        waited = max(waited, gathered[index] - forward_begins - buckets[index].needed)
    return SimulatedStep(operations, forward_begins + waited + forward)


@dataclass(frozen=True)
class MeasuredStep:
    """A step as the first ones, and the network, were measured.

    Attributes:
        parameters: in the order in which their gradients become ready.
        ready: seconds from the first gradient of backward to that of a parameter, by the id of its tensor. A parameter
            that was not seen counts as ready at the end of backward.
        needed: seconds of computation from the beginning of forward until a parameter is needed; of one that was not
            seen 0.
        halves: returns the seconds of the reduce-scatter and of the all-gather of a bucket of some parameters.
        latency: seconds of an all-gather of nothing.
        early: whether all-gathers may start under backward.
        divisible: whether a bucket can be gathered in pieces.
    """

    parameters: Sequence[NamedParameter]
    ready: Mapping[int, float]
    needed: Mapping[int, float]
    halves: Callable[[Sequence[NamedParameter]], tuple[float, float]]
    latency: float
    early: bool = True
    divisible: bool = True

    def buckets(self, layout: Sequence[Sequence[NamedParameter]]) -> list[BucketTimes]:
        """Returns the times of the buckets of these parameters."""
        end = max(self.ready.values(), default=0.0)
        times = []
        for members in layout:
            ids = [id(member.tensor) for member in members]
            ready, needed = max(self.ready.get(i, end) for i in ids), min(self.needed.get(i, 0.0) for i in ids)
            times.append(BucketTimes(ready, needed, *self.halves(members), self.latency))
        return times

    def early_gathers(self, buckets: Sequence[BucketTimes]) -> EarlyGathers:
        return choose_early_gathers(buckets, self.divisible) if self.early else EarlyGathers.none(len(buckets))

    def candidates(self) -> list[Fusion]:
        """Returns sizes with the shortest simulated step, see [Note: sizes without a search]; one for each of COSTS."""
        total = sum(map(num_bytes, self.parameters)) / MIB
        sizes = [total / 2**exponent for exponent in range(math.ceil(math.log2(MOST_BUCKETS)) + 1)]
        layouts: dict[tuple[int, ...], tuple[Fusion, list[BucketTimes]]] = {}
        for fusion in (Fusion(bucket_mb=size, edge_mb=size / 2**halved) for size in sizes for halved in HALVINGS):
            layout = plan_buckets(self.parameters, fusion)
            if len(layout) <= 2 * MOST_BUCKETS:
                layouts.setdefault(tuple(map(len, layout)), (fusion, self.buckets(layout)))
        chosen: dict[Fusion, None] = {}
        for cost in COSTS:
            found = []
            for fusion, buckets in layouts.values():
                seconds = self._mean_seconds([bucket.with_latency(cost * self.latency) for bucket in buckets])
                found.append((seconds, len(buckets), fusion))
            enough = (1 + AS_GOOD) * min(seconds for seconds, _, _ in found)
            good = [(number, seconds, i) for i, (seconds, number, _) in enumerate(found) if seconds <= enough]
            chosen[found[min(good)[2]][2]] = None
        return list(chosen)

    def _mean_seconds(self, buckets: Sequence[BucketTimes]) -> float:
        """Returns the seconds of a step, on average over ``NETWORKS``, but for computation that nothing overlaps."""
        forward, backward = max(self.needed.values(), default=0.0), max(self.ready.values(), default=0.0)
        early = self.early_gathers(buckets)
        networks = ([bucket.on(network) for bucket in buckets] for network in NETWORKS)
        return mean(simulate_step(one, forward, backward, early).seconds for one in networks)


def choose_early_gathers(buckets: Sequence[BucketTimes], divisible: bool = True) -> EarlyGathers:
    """Returns the all-gathers that run under backward.

    Of the candidates that make no simulated step longer, on any of ``NETWORKS``, this is the one with the largest mean
    gain. ``buckets`` are in the order of their reduce-scatters; ``divisible``: they can be gathered in pieces.
    """
    best = EarlyGathers.none(len(buckets))
    without, largest = _simulated_seconds(buckets, best), LEAST_GAIN
    backward = max(bucket.ready for bucket in buckets)
    if backward <= 0:  # a single gradient: there is nothing to gather under
        return best
    longest = [share * backward for share in LONGEST] if divisible else [math.inf]
    divisions = dict.fromkeys(tuple(_num_pieces(bucket, seconds) for bucket in buckets) for seconds in longest)
    for early in (gathers_in_gaps(buckets, share, pieces) for pieces in divisions for share in SHARES):
        gains = [1 - t / before for t, before in zip(_simulated_seconds(buckets, early), without, strict=True)]
        if min(gains) >= 0 and mean(gains) > largest:
            best, largest = early, mean(gains)
    return best


def _num_pieces(bucket: BucketTimes, longest: float) -> int:
    """Returns the number of pieces of a bucket, each of at most ``longest`` seconds if possible."""
    return min(MOST_PIECES, max(1, math.ceil((bucket.all_gather - bucket.latency) / longest)))


def _simulated_seconds(buckets: Sequence[BucketTimes], early: EarlyGathers) -> list[float]:
    backward, forward = max(b.ready for b in buckets), max(b.needed for b in buckets)
    return [simulate_step([b.on(network) for b in buckets], forward, backward, early).seconds for network in NETWORKS]


def gathers_in_gaps(buckets: Sequence[BucketTimes], share: float, pieces: Sequence[int]) -> EarlyGathers:
    """Returns all-gathers in the gaps between the reduce-scatters of ``buckets``, each divided into ``pieces``.

    When no reduce-scatter is ready, a piece of the reduced bucket that forward needs first is gathered, if at least
    ``share`` (0 to 1) of it is gathered before the next reduce-scatter is ready.
    """
    after: list[list[int]] = [[] for _ in buckets]
    left: dict[int, int] = {}  # pieces of the reduced buckets
    free = 0.0  # when the network is
    for index, bucket in enumerate(buckets[:-1]):
        free = max(free, bucket.ready) + bucket.reduce_scatter
        left[index] = pieces[index]
        next_is_ready = buckets[index + 1].ready
        while left and free < next_is_ready:
            first = min(left, key=lambda other: buckets[other].needed)
            seconds = buckets[first].gather(1 / pieces[first])
            if next_is_ready - free < share * seconds:
                break
            free += seconds
            after[index].append(first)
            left[first] -= 1
            if not left[first]:
                del left[first]
    return EarlyGathers(pieces, after)
