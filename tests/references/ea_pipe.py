"""EA-Pipe (Algorithms 1 to 3) and what the paper compares it to, in one process; the fuzzer trains any model by them.

An algorithm has a ``master``, and ``train`` takes a mini-batch, of which ``backward`` leaves the gradient in a model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Batch = tuple[Tensor, Tensor]
MakeOptimizer = Callable[[list[Tensor]], Optimizer]
Backward = Callable[[nn.Module, Any], object]


def backward(model: nn.Module, mini_batch: Batch | list[Batch]) -> None:
    """Computes the gradient of the cross-entropy; of a list, such as of pipelines side by side, the mean."""
    batches, parameters = mini_batch if isinstance(mini_batch, list) else [mini_batch], list(model.parameters())
    found = [torch.autograd.grad(nn.functional.cross_entropy(model(x), y), parameters) for x, y in batches]
    for p, first, *rest in zip(parameters, *found, strict=True):
        p.grad = sum(rest, first) / len(found)


class Synchronous:
    """GPipe and 1F1B: SGD."""

    def __init__(self, model: nn.Module, make_optimizer: MakeOptimizer, backward: Backward = backward) -> None:
        self.master, self.backward = copy.deepcopy(model), backward
        self.optimizer = make_optimizer(list(self.master.parameters()))

    def train(self, mini_batch: Any) -> None:
        self.backward(self.master, mini_batch)
        self.optimizer.step()
        self.master.zero_grad()

    def load(self, model: nn.Module) -> None:
        """Begins anew with these weights; optimizers keep their states."""
        self.master.load_state_dict(model.state_dict())


class ElasticReplicas:
    """Round-robin elastic averaging: mini-batches train replicas in turns; each and a master attract each other.

    Args:
        n: number of replicas.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        backward: Backward = backward,
        *,
        n: int,
        elastic_force: float = 0.5,
        period: int = 1,
    ) -> None:
        self.master = copy.deepcopy(model)
        self.replicas = [Synchronous(model, make_optimizer, backward) for _ in range(n)]
        self.force, self.period, self.t = elastic_force, period, 0

    @torch.no_grad()
    def _attract(self, replica: nn.Module) -> None:
        """Eq. 1; also of buffers."""
        for x, center in zip(tensors_of(replica), tensors_of(self.master), strict=True):
            if x.is_floating_point():
                difference = x - center
                x -= self.force * difference
                center += self.force * difference
            else:
                center.copy_(x)

    def train(self, mini_batch: Any) -> None:
        n, replica, self.t = len(self.replicas), self.replicas[self.t % len(self.replicas)], self.t + 1
        replica.train(mini_batch)
        if ceil(self.t / n) % self.period == 0:
            self._attract(replica.master)

    def load(self, model: nn.Module) -> None:
        for one in (self.master, *(replica.master for replica in self.replicas)):
            one.load_state_dict(model.state_dict())


class Stashed(Synchronous):
    """Mini-batch t sees at stage n of N (from 0 on) the weights after update t - N + n, and updates the newest.

    Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, Section 3.3.

    Args:
        stages: of each parameter; 0 of all with vertical sync, as in PipeDream.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        backward: Backward = backward,
        *,
        stages: Sequence[int],
        num_stages: int,
    ) -> None:
        super().__init__(model, make_optimizer, backward)
        self.stages, self.num_stages, self.versions = stages, num_stages, [copies(model)]

    def train(self, mini_batch: Any) -> None:
        t, seen = len(self.versions), copy.deepcopy(self.master)
        with torch.no_grad():
            for i, p in enumerate(seen.parameters()):
                p.copy_(self.versions[max(0, t - self.num_stages + self.stages[i])][i])
        self.backward(seen, mini_batch)
        for p, stashed in zip(self.master.parameters(), seen.parameters(), strict=True):
            p.grad = stashed.grad
        for buffer, new in zip(self.master.buffers(), seen.buffers(), strict=True):
            buffer.copy_(new)
        self.optimizer.step()
        self.master.zero_grad()
        self.versions.append(copies(self.master))

    def load(self, model: nn.Module) -> None:
        super().load(model)
        self.versions = [copies(model) for _ in self.versions]


class OneVersion(Synchronous):
    """Naive pipelining; with `smoothing` SpecTrain, which predicts the weights from smoothed updates.

    At the last of N stages mini-batch t is through after update t - 1, at stage n (from 0 on) its forward pass comes
    N - 1 - n updates earlier than its backward pass. The model has linear layers with ReLU between.
    """

    def __init__(
        self, model: nn.Module, make_optimizer: MakeOptimizer, *, stages: Sequence[int], smoothing: float | None
    ) -> None:
        super().__init__(model, make_optimizer)
        self.stages, self.smoothing = stages, smoothing
        self.versions, self.velocities = [copies(model)], [[torch.zeros_like(p) for p in copies(model)]]

    def _predicted(self, tensor: int, version: int, ahead: int) -> Tensor:
        now, velocity = self.versions[version][tensor], self.velocities[version][tensor]
        return now if self.smoothing is None else now + ahead * velocity

    def train(self, mini_batch: Any) -> None:
        t, n, seen, used = len(self.versions), max(self.stages) + 1, [], []
        for tensor, stage in enumerate(self.stages):
            between, after = n - 1 - stage, stage // 2
            seen.append(self._predicted(tensor, max(0, t - 1 - between), between + after))
            used.append(self._predicted(tensor, t - 1, after))
        for p, value in zip(self.master.parameters(), gradient(seen, used, mini_batch), strict=True):
            p.grad = value
        self.optimizer.step()
        old, new = self.versions[-1], copies(self.master)
        smoothed = zip(self.velocities[-1], new, old, strict=True)
        self.velocities.append([torch.lerp(v, now - was, 1 - (self.smoothing or 0.0)) for v, now, was in smoothed])
        self.versions.append(new)


def gradient(seen: list[Tensor], used: list[Tensor], mini_batch: Batch | list[Batch]) -> list[Tensor]:
    """The gradient of linear layers with weights `seen` in the forward and `used` in the backward pass."""
    if isinstance(mini_batch, list):
        of_batches = zip(*(gradient(seen, used, each) for each in mini_batch), strict=True)
        return [sum(rest, first) / len(mini_batch) for first, *rest in of_batches]
    x, y = mini_batch
    inputs, last = [], len(seen) // 2 - 1
    for layer in range(last + 1):
        inputs.append(x)
        x = x @ seen[2 * layer].t() + seen[2 * layer + 1]
        x = x if layer == last else x.relu()
    x = x.requires_grad_()
    (error,) = torch.autograd.grad(nn.functional.cross_entropy(x, y), x)
    found: list[Tensor] = []
    for layer in range(last, -1, -1):
        found = [error.t() @ inputs[layer], error.sum(dim=0), *found]  # as autograd: its transpose rounds otherwise
        error = (error @ used[2 * layer]) * (inputs[layer] > 0)
    return found


def tensors_of(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def copies(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def reference_of(
    settings: Mapping[str, Any],
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    mini_batches: Sequence[Batch | list[Batch]],
    stage_of: Sequence[int],
    smoothing: float,
) -> list[Tensor]:
    """Trains by the algorithm of an engine's settings; returns the weights.

    Args:
        stage_of: the stage of each linear layer.
        smoothing: SpecTrain's.
    """
    known = dict(settings)
    algorithm, num_stages = known.pop("algorithm", "ea_pipe"), max(stage_of) + 1
    stages = [stage for stage in stage_of for _ in ("weight", "bias")]
    reference: Any
    if algorithm == "ea_pipe":
        reference = ElasticReplicas(model, make_optimizer, n=known.pop("replicas", num_stages), **known)
    elif algorithm in ("pipedream", "weight_stashing"):
        stashed = [0] * len(stages) if algorithm == "pipedream" else stages
        reference = Stashed(model, make_optimizer, stages=stashed, num_stages=num_stages)
    else:
        predicts = algorithm == "spectrain"
        reference = OneVersion(model, make_optimizer, stages=stages, smoothing=smoothing if predicts else None)
    for mini_batch in mini_batches:
        reference.train(mini_batch)
    return copies(reference.master)
