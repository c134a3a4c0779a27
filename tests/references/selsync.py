"""Algorithm 1 of the SelSync paper in one process, with plain tensors, line by line.

Besides the paper's: `delta="auto"`, which is Robbins and Monro's search for a quantile, and DiLoCo's outer step.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def ewma(values: Sequence[float], window: int, smoothing: float) -> float:
    """The exponentially weighted moving average of the last `window` values, newest last."""
    recent = list(values)[-window:][::-1]
    weights = [(1 - smoothing) ** age for age in range(len(recent))]
    return sum(w * x for w, x in zip(weights, recent, strict=True)) / sum(weights)


def relative_change(squared_norms: Sequence[float], window: int, smoothing: float) -> float:
    """Eq. 2, from all squared norms so far; infinite while there is only one."""
    if len(squared_norms) < 2:
        return math.inf
    now = ewma(squared_norms, window, smoothing)
    before = ewma(squared_norms[:-1], window, smoothing)
    if before == 0:
        return math.inf if now else 0.0
    return abs((now - before) / before)


def next_delta(delta: float, lssr: float, was_synchronized: bool) -> float:
    """Robbins and Monro on log delta: it rests where a share `lssr` of the steps stays local."""
    return delta * math.exp(0.5 * (was_synchronized - (1 - lssr)))


def mean(tensors: Sequence[Tensor]) -> Tensor:
    """The mean, added in the order of the ranks."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total = total + tensor
    return total / len(tensors)


@torch.no_grad()
def average(of_replicas: Sequence[Sequence[Tensor]]) -> None:
    """Averages tensors that each replica has; integers become those of the first."""
    for tensors in zip(*of_replicas, strict=True):
        result = mean(tensors) if tensors[0].is_floating_point() else tensors[0].clone()
        for tensor in tensors:
            tensor.copy_(result)


def simulate(
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], Optimizer],
    loss: Callable[[nn.Module, int, int], Tensor],
    *,
    world_size: int,
    num_steps: int,
    delta: float | str,
    lssr: float = 0.8,
    aggregation: str = "parameters",
    window: int = 25,
    smoothing: float = 0.16,
    outer_lr: float | None = None,
    outer_momentum: float = 0.0,
    clip: Callable[[nn.Module], object] = lambda model: None,
    deltas: list[float] | None = None,
) -> tuple[list[nn.Module], list[bool], list[list[float]]]:
    """Returns the replicas, which steps were synchronized, and each step's relative change by rank.

    What `deltas` receives is the threshold of each step.
    """
    replicas = [copy.deepcopy(model) for _ in range(world_size)]  # line 3
    optimizers = [make_optimizer(replica) for replica in replicas]
    squared_norms: list[list[float]] = [[] for _ in replicas]
    global_model = copy.deepcopy(model)
    outer = torch.optim.SGD(global_model.parameters(), outer_lr or 1.0, outer_momentum, nesterov=outer_momentum > 0)
    threshold = 0.01 * smoothing if isinstance(delta, str) else delta
    synchronized, changes = [], []
    for i in range(num_steps):  # line 4
        for n, replica in enumerate(replicas):
            optimizers[n].zero_grad()
            loss(replica, i, n).backward()  # lines 6 and 7
            gradients = [p.grad for p in replica.parameters() if p.grad is not None]
            squared_norms[n].append(sum(g.double().square().sum().item() for g in gradients))
        change = [relative_change(values, window, smoothing) for values in squared_norms]  # line 8
        flags = [threshold < math.inf and value >= threshold for value in change]  # lines 11 to 14
        if deltas is not None:
            deltas.append(threshold)
        if delta == "auto" and max(change) < math.inf:
            threshold = next_delta(threshold, lssr, any(flags))
        if aggregation == "gradients" and any(flags):
            for parameters in zip(*(replica.parameters() for replica in replicas), strict=True):
                averaged = mean([p.grad for p in parameters])
                for p in parameters:
                    p.grad = averaged.clone()
        for n, replica in enumerate(replicas):
            clip(replica)
            optimizers[n].step()  # line 9
        if any(flags):  # lines 15 to 17
            with torch.no_grad():
                if outer_lr is not None:  # DiLoCo, Algorithm 1, lines 12 to 14
                    for parameters in zip(*(m.parameters() for m in (global_model, *replicas)), strict=True):
                        weights, *own = parameters
                        weights.grad = -mean([p - weights for p in own])
                    outer.step()
                    for replica in replicas:
                        for p, weights in zip(replica.parameters(), global_model.parameters(), strict=True):
                            p.copy_(weights)
                elif aggregation == "parameters":
                    average([list(replica.parameters()) for replica in replicas])
                average([list(replica.buffers()) for replica in replicas])
        synchronized.append(any(flags))
        changes.append(change)
    return replicas, synchronized, changes
