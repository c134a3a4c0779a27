"""What collectives cost, by measurements of several sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipesync.core.clock import Clock
from lightning_pipesync.core.cost import LinkCost

#: The largest size that is measured has from so many to so many bytes, which can be sent in so many seconds.
LEAST_BYTES, MOST_BYTES, LARGEST_S = 2**18, 2**24, 0.25

#: Each size is a fraction of the next one, and there are so many.
FACTOR, NUM_SIZES = 4, 4

#: The least and the most operations in a row, and how many times.
LEAST, MOST, ROUNDS = 4, 32, 3

#: The most ranks of Gloo among which DDP is expected to have a flat ring.
GLOO_RING_UP_TO = 16


class Waitable(Protocol):
    """An operation in flight."""

    def wait(self) -> object: ...


@dataclass(frozen=True)
class MeasuredCost(LinkCost):
    """A cost that was measured at several sizes, between which it may differ from the line of alpha and beta.

    Small messages, rings and exchanges among all have costs of their own. Among as many ranks as were measured it is as
    measured, in between linear in the logarithm of the size; among others it is the line.

    Attributes:
        world_size: the number of ranks among which it was measured.
        ratios: sizes in bytes, ascending, and by what factor more than the line was measured.
    """

    world_size: int = 0
    ratios: Sequence[tuple[float, float]] = ()

    @classmethod
    def measured(
        cls, num_bytes: Sequence[float], seconds: Sequence[float], world_size: int, halves: int
    ) -> MeasuredCost:
        """Returns the cost with the medians of each size; arguments as of :meth:`LinkCost.fit`."""
        line = LinkCost.fit(num_bytes, seconds, world_size, halves)
        ratios = []
        for size in sorted(set(num_bytes)):
            usual = median(took for one, took in zip(num_bytes, seconds, strict=True) if one == size)
            ratios.append((size, usual / (halves * line.reduce_scatter(size, world_size))))
        return cls(**asdict(line), world_size=world_size, ratios=ratios)

    def reduce_scatter(self, num_bytes: float, world_size: int) -> float:
        """Returns the seconds of half an all-reduce."""
        seconds = super().reduce_scatter(num_bytes, world_size)
        if world_size != self.world_size or not self.ratios:
            return seconds
        sizes, factors = zip(*self.ratios, strict=True)
        return seconds * float(np.interp(math.log(max(1.0, num_bytes)), np.log(sizes), factors))


@dataclass(frozen=True)
class BackendCost(MeasuredCost):
    """The cost of the backend's own all-reduce, which among other numbers of ranks takes its fastest algorithm.

    NCCL chooses between rings and double binary trees. Torch's Gloo always takes a ring (gloo/allreduce.cc).
    But nobody trains on thousands of hosts in a flat ring, and no method is to gain by a poor all-reduce of DDP: among
    more than ``ring_up_to`` ranks the all-reduce is expected to be a logarithmic one with Gloo, too.

    Attributes:
        ring_up_to: the most ranks among which there is a ring only.
    """

    ring_up_to: int = 0

    def all_reduce(self, num_bytes: float, world_size: int) -> float:
        """Returns the seconds of an all-reduce: as measured, or of the faster algorithm."""
        ring = super().all_reduce(num_bytes, world_size)
        if world_size == self.world_size or world_size <= self.ring_up_to:
            return ring
        return min(ring, self.halving_doubling(num_bytes, world_size))


def sizes_for(num_bytes: int, bandwidth: float) -> list[int]:
    """Returns the sizes to measure, in bytes, ascending.

    Args:
        num_bytes: of the gradients, the largest size that matters.
        bandwidth: bytes per second, so that it does not last long.
    """
    largest = min(max(LEAST_BYTES, num_bytes), MOST_BYTES, max(LEAST_BYTES, LARGEST_S * bandwidth))
    return [4 * round(largest / FACTOR**i / 4) for i in reversed(range(NUM_SIZES))]


def measure_in_a_row(
    start: Callable[[Tensor], Waitable], sizes: Sequence[int], device: torch.device | str, halves: int
) -> MeasuredCost:
    """Measures several operations in a row, as a step has them; a collective call.

    A first one is not counted: all ranks begin together, and a network that lets bursts pass has none left.

    Args:
        start: starts the operation of a flat fp32 buffer.
        sizes: of the buffers, in bytes.
        device: of the buffers.
        halves: 2 for an all-reduce, 1 for half of it.
    """
    clock = Clock(torch.device(device))
    points = []
    for size in [*sizes] * ROUNDS:
        number = min(MOST, max(LEAST, max(sizes) // size))
        flats = [torch.zeros(size // 4, device=device) for _ in range(number)]
        dist.barrier()
        start(flats[0]).wait()
        begin = clock.now()
        for operation in [start(flat) for flat in flats]:
            operation.wait()
        points.append((size, clock.seconds_between(begin, clock.now()) / number))
    num_bytes, seconds = zip(*points, strict=True)
    return MeasuredCost.measured(num_bytes, seconds, dist.get_world_size(), halves)


def measure_backend(sizes: Sequence[int], device: torch.device | str) -> BackendCost:
    """Measures the backend's all-reduce, which DDP uses; a collective call."""
    cost = measure_in_a_row(partial(dist.all_reduce, async_op=True), sizes, device, halves=2)
    return BackendCost(**asdict(cost), ring_up_to=GLOO_RING_UP_TO if torch.device(device).type == "cpu" else 0)


def measure_one_by_one(
    all_reduce: Callable[[Tensor], Waitable], sizes: Sequence[int], device: torch.device | str
) -> MeasuredCost:
    """Measures all-reduces of which each begins when the one before has ended, as whole gradients or weights have them.

    A collective call; arguments as of :func:`measure_in_a_row`.
    """
    clock = Clock(torch.device(device))
    points = []
    for size in sizes:
        flat = torch.zeros(size // 4, device=device)
        moments = []
        for _ in range(ROUNDS + 2):
            all_reduce(flat).wait()
            moments.append(clock.now())
        points += [(size, clock.seconds_between(*pair)) for pair in pairwise(moments[1:])]
    num_bytes, seconds = zip(*points, strict=True)
    return MeasuredCost.measured(num_bytes, seconds, dist.get_world_size(), halves=2)
