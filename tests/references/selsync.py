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


class Decisions:
    """Lines 8 and 11 to 15: which steps are synchronized, from the squared norms of all workers' gradients.

    Attributes:
        delta: the threshold of the next step.
        changes: each worker's relative change in the last step.
    """

    def __init__(
        self, world_size: int, delta: float | str, lssr: float = 0.7, window: int = 25, smoothing: float = 0.16
    ) -> None:
        self.delta = 0.01 * smoothing if isinstance(delta, str) else delta
        self.changes: list[float] = []
        self._lssr, self._window, self._smoothing = lssr if delta == "auto" else None, window, smoothing
        self._norms: list[list[float]] = [[] for _ in range(world_size)]

    def decide(self, squared_norms: Sequence[float]) -> bool:
        """Returns whether the step is synchronized: the change of some worker is at least delta."""
        self._before = copy.deepcopy(self._norms), self.delta
        self.changes = []
        for norms, squared_norm in zip(self._norms, squared_norms, strict=True):
            finite = math.isfinite(squared_norm)
            norms += [squared_norm] if finite else []
            self.changes.append(relative_change(norms, self._window, self._smoothing) if finite else math.inf)
        synchronized = self.delta < math.inf and max(self.changes) >= self.delta
        if self._lssr is not None and max(self.changes) < math.inf:
            self.delta = next_delta(self.delta, self._lssr, synchronized)
        return synchronized

    def skip(self) -> None:
        """Forgets the last decision: its step was skipped."""
        self._norms, self.delta = self._before


def mean(tensors: Sequence[Tensor]) -> Tensor:
    """The mean, added in the order of the ranks, in float32 at least."""
    at_least = torch.promote_types(tensors[0].dtype, torch.float32)
    total = tensors[0].to(at_least, copy=True)
    for tensor in tensors[1:]:
        total = total + tensor.to(at_least)
    return (total / len(tensors)).to(tensors[0].dtype)


@torch.no_grad()
def average(of_replicas: Sequence[Sequence[Tensor]]) -> None:
    """Averages tensors that each replica has; integers become those of the first."""
    for tensors in zip(*of_replicas, strict=True):
        result = mean(tensors) if tensors[0].is_floating_point() else tensors[0].clone()
        for tensor in tensors:
            tensor.copy_(result)


def squared_norm(gradients: Sequence[Tensor | None]) -> float:
    return sum(float(gradient.double().square().sum()) for gradient in gradients if gradient is not None)


def simulate(
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], Optimizer],
    loss: Callable[[nn.Module, int, int], Tensor],
    *,
    world_size: int,
    num_steps: int,
    delta: float | str,
    aggregation: str = "parameters",
    outer_lr: float | None = None,
    outer_momentum: float = 0.0,
    clip: Callable[[nn.Module], object] = lambda model: None,
    deltas: list[float] | None = None,
    **decides: float,
) -> tuple[list[nn.Module], list[bool], list[list[float]]]:
    """Returns the replicas, which steps were synchronized, and each step's relative change by rank.

    What `deltas` receives is the threshold of each step; `decides` is for :class:`Decisions`.
    """
    replicas = [copy.deepcopy(model) for _ in range(world_size)]  # line 3
    optimizers = [make_optimizer(replica) for replica in replicas]
    decisions = Decisions(world_size, delta, **decides)  # type: ignore[arg-type]
    global_model = copy.deepcopy(model)
    outer = torch.optim.SGD(global_model.parameters(), outer_lr or 1.0, outer_momentum, nesterov=outer_momentum > 0)
    synchronized, changes = [], []
    for i in range(num_steps):  # line 4
        for n, replica in enumerate(replicas):
            optimizers[n].zero_grad()
            loss(replica, i, n).backward()  # lines 6 and 7
        if deltas is not None:
            deltas.append(decisions.delta)
        together = list(zip(*(replica.parameters() for replica in replicas), strict=True))
        synchronized.append(decisions.decide([squared_norm([p.grad for p in own.parameters()]) for own in replicas]))
        changes.append(decisions.changes)
        if aggregation == "gradients" and synchronized[-1]:
            for parameters in together:
                averaged = mean([p.grad for p in parameters])
                for p in parameters:
                    p.grad = averaged.clone()
        for n, replica in enumerate(replicas):
            clip(replica)
            optimizers[n].step()  # line 9
        if not synchronized[-1]:
            continue
        if outer_lr is not None:  # DiLoCo, Algorithm 1, lines 12 to 14
            for weights, parameters in zip(global_model.parameters(), together, strict=True):
                weights.grad = -mean([(p - weights).detach() for p in parameters])
            outer.step()
            for weights, parameters in zip(global_model.parameters(), together, strict=True):
                for p in parameters:
                    p.data.copy_(weights)
        elif aggregation == "parameters":  # lines 15 to 17
            average([list(replica.parameters()) for replica in replicas])
        average([list(replica.buffers()) for replica in replicas])
    return replicas, synchronized, changes
