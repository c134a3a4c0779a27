"""Measures what communication costs: collectives of several sizes, and the exchanges of methods."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipesync.core.clock import Clock
from lightning_pipesync.core.cluster import BackendCost, MeasuredCost
from lightning_pipesync.lab.bench.candidate import sgd
from lightning_pipesync.lab.plan.replicas import EACH_RANK, Replicas
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


def measure_in_a_row(
    start: Callable[[Tensor], Waitable],
    sizes: Sequence[int],
    device: torch.device | str,
    halves: int,
    replicas: Replicas = EACH_RANK,
) -> MeasuredCost:
    """Measures several operations in a row, as they occur in a step; a collective call.

    ``start`` starts the operation of a flat fp32 buffer; an all-reduce has 2 ``halves``. The first operation is not
    counted: all ranks begin together, and a network that lets bursts pass has none left.
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
    return MeasuredCost.measured(num_bytes, seconds, replicas.number, halves)


def measure_backend(sizes: Sequence[int], device: torch.device | str, replicas: Replicas = EACH_RANK) -> BackendCost:
    """Measures the backend's all-reduce, which DDP and FSDP2 use; a collective call."""
    all_reduce = partial(dist.all_reduce, group=replicas.group, async_op=True)
    cost = measure_in_a_row(all_reduce, sizes, device, halves=2, replicas=replicas)
    return BackendCost(**asdict(cost), ring_up_to=GLOO_RING_UP_TO if torch.device(device).type == "cpu" else 0)


def measure_one_by_one(
    all_reduce: Callable[[Tensor], Waitable],
    sizes: Sequence[int],
    device: torch.device | str,
    replicas: Replicas = EACH_RANK,
) -> MeasuredCost:
    """Measures all-reduces each of which begins when the one before has ended, as for whole gradients or weights."""
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
    return MeasuredCost.measured(num_bytes, seconds, replicas.number, halves=2)


def measure_exchange(
    method: type[Method],
    exchange: Exchange,
    sizes: Sequence[int],
    device: torch.device,
    replicas: Replicas = EACH_RANK,
) -> dict[str, MeasuredCost]:
    """Measures an exchange that a method has declared, and returns its cost by codec; a collective call.

    Raises:
        ValueError: the method refuses ``replicas`` of several ranks.
    """
    costs = {
        codec: _measure_steps(method, of_codec, sizes, device, replicas)
        for codec, of_codec in exchange.settings.items()
    }
    if exchange.at_once:
        messages = replicas.number - 1
        costs = {
            codec: replace(cost, alpha=messages * cost.alpha, alpha_error=messages * cost.alpha_error, ratios=())
            for codec, cost in costs.items()
        }
    return costs


def _measure_steps(
    method: Callable[..., Any],
    settings: Mapping[str, Any],
    sizes: Sequence[int],
    device: torch.device,
    replicas: Replicas,
) -> MeasuredCost:
    """Measures steps without those of the optimizer, which count as computation."""
    points = []
    for size in sizes[-NUM_SIZES_OF_EXCHANGES:]:
        weights, alone = (nn.Parameter(replicas.as_shard(torch.zeros(size // 4, device=device))) for _ in range(2))
        optimizer = sgd([alone])
        sync = method(
            nn.ParameterList([weights]), sgd([weights]), timeout_s=TIMEOUT_S, **replicas.arguments, **settings
        )
        for _ in range(ROUNDS):
            update = _seconds(optimizer.step, alone)
            dist.barrier()
            took = _seconds(sync.step, weights)
            points.append((size, max(0.1 * took, fmean(gathered(took - update))) / STEPS))
        sync.flush()
        sync.detach()
    num_bytes, seconds = zip(*points, strict=True)
    return MeasuredCost.measured(num_bytes, seconds, replicas.number, halves=2)


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
