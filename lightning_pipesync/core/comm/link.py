"""Measures what the network costs, in a few steps of a training."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

import torch

from lightning_pipesync.core.clock import Clock
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.cost import LinkCost

#: All-gathers that measure the network: of the mean size of a bucket, in bytes between these two, and of so many times
#: that size; how many follow each other; and how many times.
SMALLEST, LARGEST, FACTOR, IN_A_ROW, ROUNDS = 2**14, 2**20, 4, 4, 3


def measure_link(transport: Transport, buckets: Sequence[int]) -> LinkCost:
    """Returns the cost of the network, from a few all-gathers of the size of ``buckets`` (bytes); collective."""
    clock = Clock(transport.device)
    smaller = 4 * round(min(LARGEST, max(SMALLEST, mean(buckets))) / 4)
    sizes = [smaller, FACTOR * smaller]
    flats = {size: torch.zeros(size // 4, dtype=torch.float32, device=transport.device) for size in sizes}
    transport.all_gather(flats[max(sizes)]).wait()  # all ranks begin, and a network that lets bursts pass has none left
    num_bytes, seconds = [], []
    for size in sizes * ROUNDS:
        begin = clock.now()
        for handle in [transport.all_gather(flats[size]) for _ in range(IN_A_ROW)]:
            handle.wait()
        num_bytes.append(size)
        seconds.append(clock.seconds_between(begin, clock.now()) / IN_A_ROW)
    return LinkCost.fit(num_bytes, seconds, transport.world_size, halves=1)
