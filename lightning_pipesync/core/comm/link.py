"""Measures what the network costs, in a few steps of a training."""

from __future__ import annotations

import torch

from lightning_pipesync.core.clock import Clock
from lightning_pipesync.core.codecs import Codec
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.cost import LinkCost

#: All-gathers that measure the network: of ``SMALL`` bytes, whose time is latency, and of ``LARGEST`` bytes at most;
#: how many follow each other; and how many times.
SMALL, LARGEST, IN_A_ROW, ROUNDS = 2**12, 2**20, 4, 3
#: Maximum seconds that they may take, as far as one all-gather of ``FIRST`` bytes tells: on a slow network the large
#: ones are smaller.
SECONDS, FIRST = 0.25, 2**18


def measure_link(transport: Transport, codec: str | Codec = "none") -> LinkCost:
    """Returns the cost of the network and of a codec, from a few all-gathers; collective.

    Its bytes are those before encoding.
    """
    clock = Clock(transport.device)

    # One for each in flight: on a torus an all-gather starts before both directions of the last one have ended.
    buffers = torch.zeros(IN_A_ROW, LARGEST // 4, dtype=torch.float32, device=transport.device)

    def measure(size: int, count: int) -> float:
        begin = clock.now()
        for handle in [transport.all_gather(flat[: size // 4], codec=codec) for flat in buffers[:count]]:
            handle.wait()
        return clock.seconds_between(begin, clock.now()) / count

    with transport.traffic.beside_steps():
        measure(FIRST, 1)  # all ranks begin, and a network that lets bursts pass has none left
        first = max(transport.gather_objects(measure(FIRST, 1)))
        affordable = FIRST * SECONDS / (first * ROUNDS * IN_A_ROW)
        large = 4 * round(max(FIRST / 4, min(LARGEST, affordable)) / 4)
        sizes = [SMALL, large] * ROUNDS
        seconds = [measure(size, IN_A_ROW) for size in sizes]
    return LinkCost.fit(sizes, seconds, transport.world_size, halves=1)
