"""Measures what the network costs, in a few steps of a training."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

import torch

from lightning_pipesync.core.clock import Clock
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.cost import LinkCost

#: All-gathers that measure the network: of the mean size of a bucket, clamped to these bytes, and of ``FACTOR`` times
#: that size; how many follow each other; and how many times.
SMALLEST, LARGEST, FACTOR, IN_A_ROW, ROUNDS = 2**14, 2**20, 4, 4, 3
#: Maximum seconds that they may take, as far as one all-gather of ``FIRST`` bytes tells: on a slow network they are
#: smaller.
SECONDS, FIRST = 0.25, 2**18


def measure_link(transport: Transport, buckets: Sequence[int]) -> LinkCost:
    """Returns the cost of the network, from a few all-gathers of the size of ``buckets`` (bytes); collective."""
    clock = Clock(transport.device)

    # One for each in flight: on a torus an all-gather starts before both directions of the last one have ended.
    buffers = torch.zeros(IN_A_ROW, FACTOR * LARGEST // 4, dtype=torch.float32, device=transport.device)

    def measure(size: int, count: int) -> float:
        begin = clock.now()
        for handle in [transport.all_gather(flat[: size // 4]) for flat in buffers[:count]]:
            handle.wait()
        return clock.seconds_between(begin, clock.now()) / count

    measure(FIRST, 1)  # all ranks begin, and a network that lets bursts pass has none left
    first = max(transport.gather_objects(measure(FIRST, 1)))
    affordable = FIRST * SECONDS / (first * ROUNDS * IN_A_ROW * (1 + FACTOR))
    smaller = 4 * round(max(SMALLEST, min(LARGEST, mean(buckets), affordable)) / 4)
    sizes = [smaller, FACTOR * smaller] * ROUNDS
    seconds = [measure(size, IN_A_ROW) for size in sizes]
    return LinkCost.fit(sizes, seconds, transport.world_size, halves=1)
