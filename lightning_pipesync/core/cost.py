"""The alpha-beta model of a network, and its fit to measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class LinkCost:
    """The alpha-beta model of a network (DeAR, Section II-D): the time of its ring collectives.

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
