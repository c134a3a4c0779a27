"""Simulates when the two halves of each bucket's all-reduce run in a training step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


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


@dataclass(frozen=True)
class Operation:
    """One operation of a simulated step, with its start and end in seconds."""

    kind: str
    bucket: int
    start: float
    end: float


@dataclass(frozen=True)
class SimulatedStep:
    """A backward pass and the forward pass that follows it."""

    operations: list[Operation]  # in the order in which they run
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
    operations: list[Operation] = []
    gathered = [0.0] * len(buckets)  # when the weights of a bucket, or of its first pieces, are there
    left = list(early.pieces)
    free = 0.0  # when the network is

    def run(kind: str, bucket: int, earliest: float, duration: float) -> float:
        nonlocal free
        start = max(free, earliest)
        free = start + duration
        operations.append(Operation(kind, bucket, start, free))
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
