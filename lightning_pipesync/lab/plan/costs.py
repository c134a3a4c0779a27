"""Measures what communication costs: collectives of several sizes, and the exchanges of methods."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipesync.core.clock import Clock
from lightning_pipesync.core.cluster import BackendCost, MeasuredCost
from lightning_pipesync.lab.bench.candidates import sgd
from lightning_pipesync.lab.plan.model import EACH_RANK, Replicas
from lightning_pipesync.lab.plan.trials import TIMEOUT_S, gathered
from lightning_pipesync.methods.laboratory import Exchange
from lightning_pipesync.methods.method import Method

#: The largest size that is measured has from so many to so many bytes, which can be sent in so many seconds.
LEAST_BYTES, MOST_BYTES, LARGEST_S = 2**18, 2**24, 0.25

#: Each size is a fraction of the next one, and there are so many.
FACTOR, NUM_SIZES = 4, 4

#: Minimum and maximum number of operations in a row, and how many times.
LEAST, MOST, ROUNDS = 4, 32, 3

#: Maximum number of ranks of Gloo among which DDP is expected to have a flat ring.
GLOO_RING_UP_TO = 16

#: Of a method's exchange: steps of a measurement, and how many of the largest sizes.
STEPS, NUM_SIZES_OF_EXCHANGES = 3, 3


class Waitable(Protocol):
    """An operation in flight."""

    def wait(self) -> object: ...


def sizes_for(num_bytes: int, bandwidth: float) -> list[int]:
    """Returns the sizes to measure, in bytes, ascending, which at ``bandwidth`` do not take long."""
    largest = min(max(LEAST_BYTES, num_bytes), MOST_BYTES, max(LEAST_BYTES, LARGEST_S * bandwidth))
    return [4 * round(largest / FACTOR**i / 4) for i in reversed(range(NUM_SIZES))]


@dataclass(frozen=True)
class Costs:
    """Measures the costs of operations on flat fp32 buffers of these ``sizes`` in bytes; each is a collective call."""

    sizes: Sequence[int]
    device: torch.device
    replicas: Replicas = EACH_RANK

    def in_a_row(self, start: Callable[[Tensor], Waitable], halves: int) -> MeasuredCost:
        """Measures several operations in a row, as they occur in a step.

        ``start`` starts the operation of a buffer; an all-reduce has 2 ``halves``. The first operation is not counted:
        all ranks begin together, and a network that lets bursts pass has none left.
        """
        clock = Clock(self.device)
        points = []
        for size in [*self.sizes] * ROUNDS:
            number = min(MOST, max(LEAST, max(self.sizes) // size))
            flats = [torch.zeros(size // 4, device=self.device) for _ in range(number)]
            dist.barrier()
            start(flats[0]).wait()
            begin = clock.now()
            for operation in [start(flat) for flat in flats]:
                operation.wait()
            points.append((size, clock.seconds_between(begin, clock.now()) / number))
        return self._cost(points, halves)

    def of_backend(self) -> BackendCost:
        """Measures the backend's all-reduce, which DDP and FSDP2 use."""
        cost = self.in_a_row(partial(dist.all_reduce, group=self.replicas.group, async_op=True), halves=2)
        return BackendCost(**asdict(cost), ring_up_to=GLOO_RING_UP_TO if self.device.type == "cpu" else 0)

    def one_by_one(self, all_reduce: Callable[[Tensor], Waitable]) -> MeasuredCost:
        """Measures all-reduces that begin when the one before has ended, as for whole gradients or weights."""
        clock = Clock(self.device)
        points = []
        for size in self.sizes:
            flat = torch.zeros(size // 4, device=self.device)
            moments = []
            for _ in range(ROUNDS + 2):
                all_reduce(flat).wait()
                moments.append(clock.now())
            points += [(size, clock.seconds_between(*pair)) for pair in pairwise(moments[1:])]
        return self._cost(points)

    def of_exchange(self, method: type[Method], exchange: Exchange) -> dict[str, MeasuredCost]:
        """Measures an exchange that a method has declared, and returns its cost by codec.

        Raises:
            ValueError: the method refuses ``replicas`` of several ranks.
        """
        costs = {codec: self._of_steps(method, of_codec) for codec, of_codec in exchange.settings.items()}
        if not exchange.at_once:
            return costs
        messages = self.replicas.number - 1
        return {
            codec: replace(cost, alpha=messages * cost.alpha, alpha_error=messages * cost.alpha_error, ratios=())
            for codec, cost in costs.items()
        }

    def _of_steps(self, method: Callable[..., Any], settings: Mapping[str, Any]) -> MeasuredCost:
        """Measures steps without those of the optimizer, which count as computation."""
        points = []
        arguments = {**self.replicas.arguments, **settings, "timeout_s": TIMEOUT_S}
        for size in self.sizes[-NUM_SIZES_OF_EXCHANGES:]:
            zeros = partial(torch.zeros, size // 4, device=self.device)
            weights, alone = (nn.Parameter(self.replicas.as_shard(zeros())) for _ in range(2))
            optimizer, sync = sgd([alone]), method(nn.ParameterList([weights]), sgd([weights]), **arguments)
            for _ in range(ROUNDS):
                update = _seconds(optimizer.step, alone)
                dist.barrier()
                took = _seconds(sync.step, weights)
                points.append((size, max(0.1 * took, fmean(gathered(took - update))) / STEPS))
            sync.flush()
            sync.detach()
        return self._cost(points)

    def _cost(self, points: Sequence[tuple[int, float]], halves: int = 2) -> MeasuredCost:
        num_bytes, seconds = zip(*points, strict=True)
        return MeasuredCost.measured(num_bytes, seconds, self.replicas.number, halves)


def _seconds(step: Callable[[], object], weights: nn.Parameter) -> float:
    """Returns the seconds of some steps, after a first one."""
    gradient = torch.zeros_like(weights)
    for taken in range(STEPS + 1):
        if taken == 1:
            _finish(weights)
            begin = time.perf_counter()
        weights.grad = gradient
        step()
    _finish(weights)
    return time.perf_counter() - begin


def _finish(weights: nn.Parameter) -> None:
    if weights.is_cuda:
        torch.cuda.synchronize(weights.device)
