"""The cost of averages and of parameter servers, which mix communication with work of their own."""

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

from lightning_pipesync.lab.bench.candidate import sgd
from lightning_pipesync.lab.plan.candidates import TIMEOUT_S
from lightning_pipesync.lab.plan.measured_cost import MeasuredCost
from lightning_pipesync.lab.plan.predictions import OUTER
from lightning_pipesync.lab.plan.ranks import gathered
from lightning_pipesync.methods.local_sgd import LocalSGD
from lightning_pipesync.methods.servers import ParameterServer
from lightning_pipesync.methods.sync_method import SyncMethod

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
    """Measures steps without those of the optimizer, which count as computation."""
    points = []
    for size in sizes[-NUM_SIZES:]:
        weights, alone = (nn.Parameter(torch.zeros(size // 4, device=device)) for _ in range(2))
        optimizer, sync = sgd([alone]), method(nn.ParameterList([weights]), sgd([weights]), timeout_s=TIMEOUT_S)
        for _ in range(ROUNDS):
            update = _seconds(optimizer.step, alone)
            dist.barrier()
            took = _seconds(sync.step, weights)
            points.append((size, max(0.1 * took, fmean(gathered(took - update))) / STEPS))
        sync.flush()
        sync.detach()
    num_bytes, seconds = zip(*points, strict=True)
    return MeasuredCost.measured(num_bytes, seconds, dist.get_world_size(), halves=2)


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
