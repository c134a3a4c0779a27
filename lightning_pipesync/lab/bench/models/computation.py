"""The duration of computation for a given ratio of communication."""

from __future__ import annotations

import math
from typing import NamedTuple


class ComputationSeconds(NamedTuple):
    """The computation of a training step, in seconds.

    Attributes:
        forward: the forward pass, a third.
        backward: the backward pass, two thirds.
    """

    forward: float
    backward: float


def computation_seconds(
    num_bytes: int, world_size: int, bandwidth_bytes_per_s: float, ratio: float
) -> ComputationSeconds:
    """Returns the computation at which the all-reduce of all gradients takes ``ratio`` times as long as it.

    The all-reduce takes ``2 (P - 1) / P * num_bytes / bandwidth``: DeAR Eq. 5 without latency. Backward takes twice as
    long as forward, since it computes two products, by the inputs and by the weights, where forward computes one.

    Args:
        num_bytes: the size of all gradients.
        world_size: number of ranks P, at least 2.
        bandwidth_bytes_per_s: the bandwidth of each rank's link, one way.
        ratio: communication time over computation time, positive.

    Raises:
        ValueError: an argument is out of its range.
    """
    if world_size < 2:
        raise ValueError(f"world_size must be at least 2 for a ratio of communication, got {world_size!r}.")
    for name, value in (
        ("num_bytes", num_bytes),
        ("bandwidth_bytes_per_s", bandwidth_bytes_per_s),
        ("ratio", ratio),
    ):
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be a positive number, got {value!r}.")
    all_reduce = 2 * (world_size - 1) / world_size * num_bytes / bandwidth_bytes_per_s
    seconds = all_reduce / ratio
    return ComputationSeconds(seconds / 3, 2 * seconds / 3)
