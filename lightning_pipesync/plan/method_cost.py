"""What the communication of a method costs in which it is mixed with its own work, by steps that compute nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_pipesync.bench.candidate import sgd
from lightning_pipesync.methods.local_sgd import LocalSGD
from lightning_pipesync.methods.parameter_server import ParameterServer
from lightning_pipesync.methods.sync_method import SyncMethod
from lightning_pipesync.plan.candidates import TIMEOUT_S
from lightning_pipesync.plan.measured_cost import MeasuredCost
from lightning_pipesync.plan.predictions import OUTER

#: Steps of a measurement, measurements of each size, and how many of the largest sizes.
STEPS, ROUNDS, NUM_SIZES = 3, 3, 3


def measure_averages(codec: str, sizes: Sequence[int], device: torch.device) -> MeasuredCost:
    """Measures averages of weights, with their outer step; a collective call.

    Args:
        codec: of the differences.
        sizes: of the weights, in bytes, ascending.
        device: of the weights.
    """
    settings: dict[str, Any] = {**OUTER, "period": 1, "compression": codec}
    return _measure(partial(LocalSGD, **settings), sizes, device)


def measure_servers(sizes: Sequence[int], device: torch.device) -> MeasuredCost:
    """Measures pushes and pulls of learners at their own pace; a collective call. Arguments as above."""
    cost = _measure(ParameterServer, sizes, device)
    # The messages of a half are under way at once: see sharded_servers.
    messages = dist.get_world_size() - 1
    return replace(cost, alpha=messages * cost.alpha, alpha_error=messages * cost.alpha_error, ratios=())


def _measure(method: Callable[..., SyncMethod], sizes: Sequence[int], device: torch.device) -> MeasuredCost:
    points = []
    for size in sizes[-NUM_SIZES:]:
        weights = nn.Parameter(torch.zeros(size // 4, device=device))
        sync = method(nn.ParameterList([weights]), sgd([weights]), timeout_s=TIMEOUT_S)
        for _ in range(ROUNDS):
            _take(sync, weights, 1)  # until all ranks are here
            begin = time.perf_counter()
            _take(sync, weights, STEPS)
            points.append((size, _mean_of_ranks(time.perf_counter() - begin) / STEPS))
        sync.flush()
        sync.detach()
    num_bytes, seconds = zip(*points, strict=True)
    return MeasuredCost.measured(num_bytes, seconds, dist.get_world_size(), halves=2)


def _take(sync: SyncMethod, weights: Any, steps: int) -> None:
    for _ in range(steps):
        weights.grad = torch.zeros_like(weights)
        sync.step()
    if weights.is_cuda:
        torch.cuda.synchronize()


def _mean_of_ranks(seconds: float) -> float:
    everyones: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(everyones, seconds)
    return fmean(everyones)
