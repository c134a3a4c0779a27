"""Cost models of the papers: the time of a collective, and the shortest time of a training step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class LinkCost:
    """The alpha-beta model of a network (DeAR, Section II-D): the time of its ring collectives and parameter servers.

    Links are full duplex, and what a rank computes on the way, such as sums, takes no time.
    """

    alpha: float  # latency of a message, in seconds
    beta: float  # seconds per byte
    alpha_error: float = math.nan  # standard error, if it was fitted
    beta_error: float = math.nan

    @classmethod
    def fit(cls, num_bytes: Sequence[float], seconds: Sequence[float], world_size: int, halves: int = 2) -> LinkCost:
        """Fits the model to measurements by least squares of the relative errors; alpha and beta are not negative.

        Args:
            num_bytes: sizes of the whole buffer, of which at least two differ.
            seconds: the duration for each size.
            world_size: number of ranks, at least 2.
            halves: 2 for an all-reduce (Eq. 5), 1 for a reduce-scatter (Eq. 3) or an all-gather (Eq. 4).

        Raises:
            ValueError: there are not two different sizes, or fewer than two ranks.
        """
        if world_size < 2 or len(set(num_bytes)) < 2:
            raise ValueError(f"A fit needs 2 ranks and 2 sizes, got {world_size} and {sorted(set(num_bytes))}.")
        messages = halves * (world_size - 1)
        columns = np.stack([np.full(len(num_bytes), float(messages)), messages / world_size * np.asarray(num_bytes)], 1)
        weighted = columns / np.asarray(seconds)[:, None]
        target = np.ones(len(seconds))
        (alpha, beta), *_ = np.linalg.lstsq(weighted, target, rcond=None)
        if alpha < 0:  # a line through the origin
            alpha, beta = 0.0, float(weighted[:, 1] @ target / (weighted[:, 1] @ weighted[:, 1]))
        if beta < 0:  # as long for all sizes
            alpha, beta = float(weighted[:, 0] @ target / (weighted[:, 0] @ weighted[:, 0])), 0.0
        residuals = target - weighted @ np.array([alpha, beta])
        freedom = max(1, len(seconds) - 2)
        covariance = np.linalg.inv(weighted.T @ weighted) * (residuals @ residuals) / freedom
        return cls(float(alpha), float(beta), *(float(error) for error in np.sqrt(np.diag(covariance))))

    def reduce_scatter(self, num_bytes: float, world_size: int) -> float:
        """Returns the seconds of a reduce-scatter (Eq. 3)."""
        return (world_size - 1) * (self.alpha + num_bytes / world_size * self.beta)

    def all_gather(self, num_bytes: float, world_size: int) -> float:
        """Returns the seconds of an all-gather (Eq. 4)."""
        return self.reduce_scatter(num_bytes, world_size)

    def all_reduce(self, num_bytes: float, world_size: int) -> float:
        """Returns the seconds of an all-reduce (Eq. 5)."""
        return self.reduce_scatter(num_bytes, world_size) + self.all_gather(num_bytes, world_size)

    def tree_half(self, num_bytes: float, world_size: int, pieces: float = math.inf) -> float:
        """Returns the seconds of a reduce, or of a broadcast, on a double binary tree (DeAR, Section VII-A).

        ceil(log2 P) messages follow each other, and a rank sends and receives N bytes (Sanders et al., "Two-tree
        algorithms for full bandwidth broadcast, reduction and scan", 2009). Of each half of the buffer, which travels
        in ``pieces``, the first one passes all levels of its tree before the next ones keep all links busy.
        """
        if world_size == 1:
            return 0.0
        depth = math.ceil(math.log2(world_size))
        return depth * self.alpha + (1 + (depth - 1) / pieces) * num_bytes * self.beta

    def double_tree(self, num_bytes: float, world_size: int) -> float:
        """Returns the seconds of an all-reduce on a double binary tree, in small pieces: on many ranks far less than a
        ring's.

        So NCCL does, in 2 log2(P) messages and 2 N bytes (S. Jeaugey, "Massively Scale Your Deep Learning Training with
        NCCL 2.4", 2019). Halving and doubling would take about as long.
        """
        return 2 * self.tree_half(num_bytes, world_size)

    def average_with(self, num_bytes: float, peers: int) -> float:
        """Returns the seconds in which a rank averages with ``peers`` others, at once: each gets all of its values."""
        return self.alpha + peers * num_bytes * self.beta if peers else 0.0

    def torus_half(self, num_bytes: float, columns: int, rows: int) -> float:
        """Returns the seconds of a reduce-scatter, or of an all-gather, on a 2-D torus: along rows, then columns."""
        return self.reduce_scatter(num_bytes, columns) + self.reduce_scatter(num_bytes / columns, rows)

    def sharded_servers(self, num_bytes: float, world_size: int, servers: int | None = None) -> float:
        """Returns the seconds in which all ranks push N bytes of gradients to servers, then pull as many of weights.

        Each of the first S ranks serves a shard of N / S bytes beside its own work. The most loaded links are theirs:
        (P - 1) N / S bytes come in with the push, and as many go out with the pull. With S = P these are the
        2 N (P - 1) / P bytes of a ring. But the P - 1 messages of a half are under way at once, where those of a ring
        follow each other. So alpha counts once a half, which assumes that it is latency; of what it has of processor
        time for a message, a server spends P - 1 times as much, as in a ring.

        Args:
            num_bytes: N.
            world_size: P.
            servers: S, from 1 to P; None: P.
        """
        servers = world_size if servers is None else servers
        if not 1 <= servers <= world_size:
            raise ValueError(f"servers must be from 1 to the number of ranks, {world_size}, got {servers!r}.")
        if world_size == 1:
            return 0.0
        return 2 * (self.alpha + (world_size - 1) * num_bytes / servers * self.beta)


@dataclass(frozen=True)
class StepCost:
    """The parts of a training step, in seconds, and its duration when everything overlaps that can."""

    forward: float  # t_ff
    backward: float  # t_bp
    update: float  # the optimizer step, which overlaps with nothing
    reduce_scatter: float  # t_rs of the whole gradient
    all_gather: float  # t_ag of the whole gradient

    def compressed(self, ratio: float) -> StepCost:
        return replace(self, reduce_scatter=self.reduce_scatter / ratio, all_gather=self.all_gather / ratio)

    @property
    def compute(self) -> float:
        """A step without communication."""
        return self.forward + self.backward + self.update

    @property
    def all_reduce(self) -> float:
        """t_ar."""
        return self.reduce_scatter + self.all_gather

    @property
    def ratio(self) -> float:
        """Communication over computation."""
        return self.all_reduce / (self.forward + self.backward)

    @property
    def serial(self) -> float:
        """The all-reduce hidden under nothing."""
        return self.compute + self.all_reduce

    @property
    def under_forward(self) -> float:
        """The all-reduce after the update, hidden under the next forward pass."""
        return self.backward + max(self.forward, self.all_reduce) + self.update

    @property
    def baseline(self) -> float:
        """The all-reduce hidden under backward: DDP at its best (DeAR, Eq. 8)."""
        return self.forward + max(self.backward, self.all_reduce) + self.update

    @property
    def reduce_scatter_only(self) -> float:
        """A step of DeAR without all-gathers (Fig. 8)."""
        return self.forward + max(self.backward, self.reduce_scatter) + self.update

    @property
    def all_gather_only(self) -> float:
        """A step of DeAR without reduce-scatters (Fig. 8)."""
        return max(self.forward, self.all_gather) + self.backward + self.update

    @property
    def two_halves(self) -> float:
        """The two halves hidden under backward and forward: DeAR at its best (Eq. 7)."""
        return max(self.forward, self.all_gather) + max(self.backward, self.reduce_scatter) + self.update

    @property
    def eager(self) -> float:
        """The two halves hidden under the whole step: the least of exact synchronous SGD, but for what the last
        reduce-scatter and the first all-gather leave bare."""
        return max(self.forward + self.backward, self.all_reduce) + self.update

    @property
    def under_next_step(self) -> float:
        """The all-reduce hidden under the whole next step (Pipe-SGD, timing model with limited resources)."""
        return max(self.compute, self.all_reduce)

    def max_speedup(self, world_size: int) -> float:
        """Returns S_max, the speed-up of DeAR on ``world_size`` ranks over one (Eq. 6), if the update takes no time."""
        compute = self.forward + self.backward
        hidden = min(self.reduce_scatter, self.backward) + min(self.all_gather, self.forward)
        return world_size * compute / (compute + self.all_reduce - hidden)


def end_of_pipeline(ready: Sequence[float], durations: Sequence[float]) -> float:
    """Returns when the last of several serial operations ends, each of which starts once it is ready.

    For the times at which DDP's buckets become ready in backward, and the durations of their all-reduces, this is when
    all gradients are reduced: Eq. 8 with buckets of finite size and cost.
    """
    end = 0.0
    for start, duration in zip(ready, durations, strict=True):
        end = max(end, start) + duration
    return end
