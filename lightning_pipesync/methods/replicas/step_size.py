"""The length of local steps: Adam divides them by a rank's noise, and they are shorter than with averaged gradients.

Adam divides by the root of the second moment. Of the gradient of one of P ranks that is G + S, where G is the squared
norm of the expected gradient, and S the variance of a batch's; of the average over the ranks, which DDP takes, it is
only G + S / P. So the replicas, and with them their average, move as if the learning rate were smaller by the root of

    (G + S) / (G + S / P) = 1 / (1 - (1 - 1 / P) f),        f = S / (G + S),

at most by sqrt(P). A learning rate that is larger by this factor gives each step its length with DDP. Where only a
share l of the second moment is of this rank's gradients, as after a warm-up:

    (l (G + S) + (1 - l) (G + S / P)) / (G + S / P) = 1 + l ((G + S) / (G + S / P) - 1).

The share of noise, f, follows from the first moment without communication. That averages gradients with weights w_i, so
that its expected square is G + c S, where c is the sum of the squared weights, (1 - beta1) / (1 + beta1) after many
steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Adam, NAdam, Optimizer, RAdam

from lightning_pipesync.core.parameters import SquaredNorm
from lightning_pipesync.core.private_names import with_attributes
from lightning_pipesync.core.sharding import copies_of
from lightning_pipesync.methods.hyperparameters import current, in_use

#: Optimizers whose moments are those of Adam; AdamW is a subclass.
ADAMS = (Adam, NAdam, RAdam)

#: Steps from one measurement to the next, and the weight of a new one in their moving average.
EVERY, SMOOTHING = 8, 0.1


class StepSize:
    """Makes the local steps of an optimizer as long as they are with averaged gradients.

    ``scale`` is the factor on its learning rates; ``"auto"``: as measured for :data:`ADAMS`, 1 for others. ``noise`` is
    f, the share of noise in the squared norm of this rank's gradient, as a moving average; None: not measured.
    ``sum_over_shards`` is as of :func:`measured_noise`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        scale: float | Literal["auto"],
        num_replicas: int,
        sum_over_shards: Callable[[float], float] = float,
    ) -> None:
        self._sum_over_shards = sum_over_shards
        self._optimizer, self._scale, self._num_replicas = optimizer, scale, num_replicas
        self.noise: float | None = None
        self._num_steps = 0
        self._num_before = 0  # of the optimizer's steps those that were not local, when it was measured

    @property
    def scale(self) -> float:
        """Factor on the learning rates of the next step."""
        if self._scale != "auto":
            return self._scale
        if self.noise is None:
            return 1.0
        beta = float(self._optimizer.param_groups[0]["betas"][1])
        local = (1 - beta**self._num_steps) / (1 - beta ** (self._num_steps + self._num_before))
        return scale_of(self.noise, self._num_replicas, local)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Context manager in which ``optimizer.step`` is a local step; a closure sees the user's learning rates.

        Decoupled weight decay does not change: torch's ``decoupled_weight_decay`` in a parameter group says that it is.
        """
        if (scale := self.scale) == 1:
            yield
        else:
            with with_attributes(self._optimizer, step=partial(self._step, self._optimizer.step, scale)):
                yield
        self._num_steps += 1
        if self._scale == "auto" and self._num_steps % EVERY == 0:
            self._measure()

    def state_dict(self) -> dict[str, Any]:
        return {"noise": self.noise, "steps": self._num_steps, "before": self._num_before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.noise, self._num_steps, self._num_before = state["noise"], state["steps"], state["before"]

    def _step(
        self, step: Callable[..., Any], scale: float, closure: Callable[[], Any] | None = None, **arguments: Any
    ) -> Any:
        """Takes a step of the optimizer with scaled learning rates, after a closure with the user's."""
        result = None if closure is None else torch.enable_grad()(closure)()
        hyperparameters = current(self._optimizer)
        for group in hyperparameters:
            group["lr"] = group["lr"] * scale
            if group.get("decoupled_weight_decay"):
                group["weight_decay"] = group["weight_decay"] / scale
        with in_use(self._optimizer, hyperparameters, []):
            returned = step(**arguments)
        return returned if closure is None else result

    def _measure(self) -> None:
        noise = measured_noise(self._optimizer, self._sum_over_shards)
        if noise is not None:
            self.noise = noise if self.noise is None else self.noise + SMOOTHING * (noise - self.noise)
            steps = max(_steps(group, self._optimizer) for group in self._optimizer.param_groups)
            self._num_before = max(0, steps - self._num_steps)


def scale_of(noise: float, num_replicas: int, local: float = 1.0) -> float:
    """Returns the factor by which ``noise``, f, shortens Adam's steps, from 1 to ``sqrt(num_replicas)``.

    ``local`` is l, the share of the second moment that is of this rank's gradients.
    """
    averaged = 1 - (1 - 1 / num_replicas) * noise
    return math.sqrt(1 + local * (1 / averaged - 1))


@torch.no_grad()
def measured_noise(optimizer: Optimizer, sum_over_shards: Callable[[float], float] = float) -> float | None:
    """Returns f, the share of noise in the squared norm of the present gradients, from 0 to 1.

    ``sum_over_shards`` adds up the squared norms of a model that is sharded.
    None if it is unknown: the optimizer is none of :data:`ADAMS`, no parameter has a gradient and moments, they are of
    the first step, or a value is not finite.
    """
    if not isinstance(optimizer, ADAMS):
        return None
    gradient = moment = by_chance = 0.0  # squared norms; by_chance is the moment's if all is noise
    for group in optimizer.param_groups:
        moved = [p for p in group["params"] if p.grad is not None and "exp_avg" in optimizer.state[p]]
        if not moved:
            continue
        beta, steps = float(group["betas"][0]), _steps(group, optimizer)
        copies = [copies_of(p) for p in moved]
        of_group = SquaredNorm([_averaged(p, group) for p in moved], copies).item()
        gradient += of_group
        moment += SquaredNorm([optimizer.state[p]["exp_avg"] for p in moved], copies).item() / (1 - beta**steps) ** 2
        by_chance += of_group * (1 - beta) / (1 + beta) * (1 + beta**steps) / (1 - beta**steps)
    gradient, moment, by_chance = map(sum_over_shards, (gradient, moment, by_chance))
    if not (0 < gradient - by_chance < math.inf and math.isfinite(moment)):
        return None
    return min(max((gradient - moment) / (gradient - by_chance), 0.0), 1.0)


def _steps(group: Mapping[str, Any], optimizer: Optimizer) -> int:
    states = [optimizer.state[p] for p in group["params"] if p.grad is not None and "step" in optimizer.state[p]]
    return int(states[0]["step"]) if states else 0


def _averaged(parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Returns what the first moment averages: the gradient, with weight decay unless that is decoupled."""
    assert parameter.grad is not None
    decay = 0.0 if group.get("decoupled_weight_decay") else group.get("weight_decay", 0.0)
    sign = -1 if group.get("maximize") else 1
    return parameter.grad.add(parameter, alpha=sign * decay) if decay else parameter.grad
