"""Many trainings of pipelines of dense layers at once, equivalent to the engine, as batched matrix products.

The trainings of a batch differ in seed, learning rate, elastic force and synchronization period. With EA-Pipe a round
of one mini-batch per replica is computed together, too (Eq. 13).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_pipesync.methods.ea_pipe import EAPipeConfig
from lightning_pipesync.methods.ea_pipe.channels import Schedule


class Dense:
    """Dense layers with ReLU between, for many models at once; each row has the weights and biases of a model.

    ``widths`` are those of the input and of each layer's output; ``stage_of`` has the stage of each layer. The output
    of a layer in ``residual`` has the output of the layer before it added, before its ReLU.
    """

    def __init__(self, widths: Sequence[int], stage_of: Sequence[int], residual: Collection[int] = ()) -> None:
        self._shapes = [(outputs, inputs) for inputs, outputs in pairwise(widths)]
        ends = list(accumulate((inputs + 1) * outputs for outputs, inputs in self._shapes))
        self._spans = list(pairwise([0, *ends]))
        self.size, self.stage_of, self._residual = ends[-1], list(stage_of), frozenset(residual)
        self.columns = [self._columns(stage) for stage in range(max(stage_of) + 1)]  # of the weights of each stage

    def _columns(self, stage: int) -> slice:
        spans = [span for span, other in zip(self._spans, self.stage_of, strict=True) if other == stage]
        return slice(spans[0][0], spans[-1][1])

    def _views(self, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Returns weights ``[models, out, in]`` and biases ``[models, 1, out]`` of all layers."""
        views = []
        for (outputs, inputs), (start, end) in zip(self._shapes, self._spans, strict=True):
            weight = rows[:, start : end - outputs].unflatten(1, (outputs, inputs))
            views.append((weight, rows[:, end - outputs : end].unsqueeze(1)))
        return views

    def forward(self, rows: Tensor, x: Tensor) -> list[Tensor]:
        """Returns the inputs of all layers, and the output; ``x`` has the shape ``[models, samples, inputs]``."""
        values, output = [], x
        for layer, (weight, bias) in enumerate(self._views(rows)):
            before = output
            values.append(before if layer == 0 else before.relu() if layer in self._residual else before.relu_())
            output = torch.baddbmm(bias, values[-1], weight.transpose(1, 2))
            if layer in self._residual:
                output += before
        return [*values, output]

    def gradient(self, seen: Tensor, used: Tensor, x: Tensor, y: Tensor, out: Tensor) -> None:
        """Computes the gradient of the mean cross-entropy into ``out``, shaped like ``seen``.

        Args:
            seen: the weights of the forward pass, ``[models, size]``.
            used: the weights of the backward pass.
            x: shape ``[models, samples, inputs]``.
            y: labels, ``[models, samples]``.
        """
        *inputs, output = self.forward(seen, x)
        error = output.softmax(dim=2)
        error.scatter_add_(2, y.unsqueeze(2), error.new_full((1, 1, 1), -1.0).expand(*y.shape, 1))
        error /= y.shape[1]
        layers = zip(inputs, self._views(used), self._views(out), strict=True)
        for layer, (given, (weight, _), (weight_gradient, bias_gradient)) in reversed(list(enumerate(layers))):
            weight_gradient.copy_(torch.bmm(error.transpose(1, 2), given))  # faster than writing into part of the rows
            torch.sum(error, dim=1, keepdim=True, out=bias_gradient)
            if layer:
                before = torch.bmm(error, weight).mul_(given > 0)
                error = before.add_(error) if layer in self._residual else before


class Trainings(ABC):
    """Lockstep trainings with the same method.

    Args:
        model: the layers.
        initial: the initial weights, ``[trainings, size]``.
        learning_rates: the learning rate of each training, ``[trainings, 1]``; may be changed in place.
        momentum: the momentum of SGD.
        weight_decay: the weight decay of SGD.
    """

    #: The number of mini-batches of a :meth:`step`.
    num_at_once = 1

    def __init__(
        self, model: Dense, initial: Tensor, learning_rates: Tensor, momentum: float, weight_decay: float
    ) -> None:
        self.model, self.master, self.learning_rates = model, initial.clone(), learning_rates
        self._momentum, self._weight_decay = momentum, weight_decay

    @abstractmethod
    def step(self, x: Tensor, y: Tensor) -> None:
        """Trains on mini-batches ``x`` of shape ``[num_at_once, trainings, samples, inputs]``, with labels ``y``."""

    def _update(self, weights: Tensor, gradient: Tensor, velocity: Tensor) -> None:
        """Takes a step of SGD in place; overwrites ``gradient``."""
        if self._weight_decay:
            gradient.add_(weights, alpha=self._weight_decay)
        if self._momentum:
            gradient = velocity.mul_(self._momentum).add_(gradient)
        weights.addcmul_(gradient, self.learning_rates, value=-1)


class Elastic(Trainings):
    """EA-Pipe, a round at a time, in which each replica uses a mini-batch and is pulled (Algorithm 1).

    There are N ``replicas``; elastic forces alpha and synchronization periods tau have the shape ``[trainings, 1]``.
    """

    def __init__(self, *common: Any, num_replicas: int, elastic_forces: Tensor, sync_periods: Tensor) -> None:
        super().__init__(*common)
        self.num_at_once, self._round = num_replicas, 0
        self._forces, self._periods = elastic_forces, sync_periods
        self.replicas = self.master.repeat(num_replicas, 1, 1)
        self._velocity, self._gradient = torch.zeros_like(self.replicas), torch.empty_like(self.replicas)

    def step(self, x: Tensor, y: Tensor) -> None:
        seen = self.replicas.flatten(0, 1)
        self.model.gradient(seen, seen, x.flatten(0, 1), y.flatten(0, 1), self._gradient.flatten(0, 1))
        self._update(self.replicas, self._gradient, self._velocity)
        self._round += 1
        forces = self._forces * (self._round % self._periods == 0)
        if forces.any():
            for replica in self.replicas:  # in sequence, because each pull moves the master (Eq. 1)
                force = torch.sub(replica, self.master).mul_(forces)
                replica.sub_(force)
                self.master.add_(force)


class Delayed(Trainings):
    """One master, of which each stage uses an earlier version, or a prediction from it and the last updates.

    Args:
        forward: the age, in updates, of the weights of each stage in the forward pass.
        backward: the age, in updates, of the weights of each stage in the backward pass.
        ahead: the number of updates by which each stage predicts its weights in the backward pass; in the forward pass
            it predicts by their age in addition. None: no prediction.
        smoothing: the smoothing of the updates for the prediction.
    """

    def __init__(
        self,
        *common: Any,
        forward: Sequence[int],
        backward: Sequence[int],
        ahead: Sequence[int] | None = None,
        smoothing: float = 0.0,
    ) -> None:
        super().__init__(*common)
        self._forward, self._backward, self._ahead, self._smoothing = forward, backward, ahead, smoothing
        self._versions = self.master.repeat(max(forward) + 1, 1, 1)
        self._moves = torch.zeros_like(self._versions)
        self._steps = 0
        self._gradient, self._velocity = torch.empty_like(self.master), torch.zeros_like(self.master)

    def step(self, x: Tensor, y: Tensor) -> None:
        ahead = None if self._ahead is None else [a + f for a, f in zip(self._ahead, self._forward, strict=True)]
        seen, used = self._seen(self._forward, ahead), self._seen(self._backward, self._ahead)
        self.model.gradient(seen, used, x[0], y[0], self._gradient)
        before, move = self.master.clone(), self._moves[self._slot(0)]
        self._update(self.master, self._gradient, self._velocity)
        self._steps += 1
        self._versions[self._slot(0)] = self.master
        if self._ahead is not None:
            torch.lerp(move, self.master - before, 1 - self._smoothing, out=self._moves[self._slot(0)])

    def _slot(self, lag: int) -> int:
        return (self._steps - lag) % len(self._versions)

    def _seen(self, lags: Sequence[int], ahead: Sequence[int] | None) -> Tensor:
        """Returns the weights of each stage ``lags`` updates ago, predicted by ``ahead`` updates from there."""
        if ahead is None and len(set(lags)) == 1:
            return self._versions[self._slot(lags[0])]
        seen = torch.empty_like(self.master)
        for stage, lag in enumerate(lags):
            columns = self.model.columns[stage]
            seen[:, columns] = self._versions[self._slot(lag), :, columns]
            if ahead is not None:
                seen[:, columns].add_(self._moves[self._slot(lag), :, columns], alpha=ahead[stage])
        return seen


def trainings_of(
    configs: Sequence[EAPipeConfig],
    model: Dense,
    initial: Tensor,
    learning_rates: Tensor,
    momentum: float,
    decay: float,
) -> Trainings:
    """Returns a training for each of ``configs``, as the arguments of :class:`Trainings` say.

    They are settings of the same algorithm, number of replicas and smoothing; ``naive`` with a single stage is SGD.
    """
    config, num_stages = configs[0], max(model.stage_of) + 1
    n = config.replicas or num_stages
    common = (model, initial, learning_rates, momentum, decay)
    if config.algorithm == "ea_pipe":
        forces = initial.new_tensor([[each.elastic_force] for each in configs])
        periods = torch.tensor([[each.period] for each in configs])
        return Elastic(*common, num_replicas=n, elastic_forces=forces, sync_periods=periods)
    if config.algorithm == "pipedream":
        return Delayed(*common, forward=[n - 1] * num_stages, backward=[n - 1] * num_stages)
    schedules = [Schedule(stage, num_stages, n) for stage in range(num_stages)]
    lags = [schedule.lag for schedule in schedules]
    if config.algorithm == "weight_stashing":
        return Delayed(*common, forward=lags, backward=lags)
    now = [0] * num_stages
    if config.algorithm == "naive":
        return Delayed(*common, forward=lags, backward=now)
    smoothing = config.prediction_smoothing
    return Delayed(
        *common,
        forward=lags,
        backward=now,
        ahead=[schedule.versions_after for schedule in schedules],
        smoothing=(0.0 if momentum else 0.9) if smoothing is None else smoothing,
    )
