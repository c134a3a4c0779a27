"""EA-Pipe (Algorithms 1 to 3) and what the paper compares it to, in one process, with plain tensors.

The model is a list of weights and biases with ReLU between; its gradient is written out, so that the weights of the
backward pass may differ from those of the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

#: Weight [out, in] and bias [out] of each layer, one after the other.
Weights = list[Tensor]
Batch = tuple[Tensor, Tensor]
#: A mini-batch; or those of pipelines side by side, whose mean gradient counts.
MiniBatch = Batch | list[Batch]
MakeOptimizer = Callable[[Weights], Optimizer]


def gradient(seen: Weights, used: Weights, batch: MiniBatch) -> Weights:
    """The gradient of the cross-entropy with weights `seen` in the forward and `used` in the backward pass.

    Of a list of batches, such as those of pipelines side by side, the mean.
    """
    if isinstance(batch, list):
        of_batches = zip(*(gradient(seen, used, each) for each in batch), strict=True)
        return [sum(rest, first) / len(batch) for first, *rest in of_batches]
    x, y = batch
    inputs, last = [], len(seen) // 2 - 1
    for layer in range(last + 1):
        inputs.append(x)
        x = x @ seen[2 * layer].t() + seen[2 * layer + 1]
        x = x if layer == last else x.relu()
    x = x.requires_grad_()
    (error,) = torch.autograd.grad(torch.nn.functional.cross_entropy(x, y), x)
    found: Weights = []
    for layer in range(last, -1, -1):
        found = [error.t() @ inputs[layer], error.sum(dim=0), *found]  # as autograd: its transpose rounds otherwise
        error = (error @ used[2 * layer]) * (inputs[layer] > 0)
    return found


def copied(weights: Sequence[Tensor]) -> Weights:
    return [tensor.detach().clone() for tensor in weights]


def step(optimizer: Optimizer, weights: Weights, gradients: Weights) -> None:
    for tensor, value in zip(weights, gradients, strict=True):
        tensor.grad = value
    optimizer.step()


class ElasticReplicas:
    """Round-robin elastic averaging: mini-batches train replicas in turns; each and a master attract each other.

    Args:
        n: number of replicas.
    """

    def __init__(
        self, initial: Weights, make_optimizer: MakeOptimizer, n: int, elastic_force: float = 0.5, period: int = 1
    ) -> None:
        self.master, self.local = copied(initial), [copied(initial) for _ in range(n)]
        self.optimizers = [make_optimizer(weights) for weights in self.local]
        self.force, self.period, self.t = elastic_force, period, 0

    def train(self, batch: MiniBatch) -> None:
        n, i, self.t = len(self.local), self.t % len(self.local), self.t + 1
        step(self.optimizers[i], self.local[i], gradient(self.local[i], self.local[i], batch))
        if ceil(self.t / n) % self.period == 0:
            for x, center in zip(self.local[i], self.master, strict=True):  # Eq. 1
                with torch.no_grad():
                    difference = x - center
                    x -= self.force * difference
                    center += self.force * difference


def pipedream(
    initial: Weights, make_optimizer: MakeOptimizer, batches: Sequence[MiniBatch], num_stages: int
) -> Weights:
    """Weight stashing and vertical sync: mini-batch t sees the weights after update t - N, and updates the newest."""
    master, versions = copied(initial), [copied(initial)]
    optimizer = make_optimizer(master)
    for t, batch in enumerate(batches, 1):
        stashed = versions[max(0, t - num_stages)]
        step(optimizer, master, gradient(stashed, stashed, batch))
        versions.append(copied(master))
    return master


def weight_stashing(
    initial: Weights, make_optimizer: MakeOptimizer, batches: Sequence[MiniBatch], stage_of: Sequence[int]
) -> Weights:
    """At stage n of N (from 0 on) mini-batch t sees the weights after update t - N + n, and updates the newest.

    Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, Section 3.3.
    """
    n = max(stage_of) + 1
    weights, versions = copied(initial), [copied(initial)]
    optimizer = make_optimizer(weights)
    for t, batch in enumerate(batches, 1):
        stashed = [versions[max(0, t - n + stage_of[tensor // 2])][tensor] for tensor in range(len(initial))]
        step(optimizer, weights, gradient(stashed, stashed, batch))
        versions.append(copied(weights))
    return weights


def one_version(
    initial: Weights,
    make_optimizer: MakeOptimizer,
    batches: Sequence[MiniBatch],
    stage_of: Sequence[int],
    smoothing: float | None = None,
) -> Weights:
    """Naive pipelining; with `smoothing` SpecTrain, which predicts the weights from smoothed updates.

    At the last of N stages mini-batch t is through after update t - 1, at stage n (from 0 on) its forward pass comes
    N - 1 - n updates earlier than its backward pass.
    """
    n = max(stage_of) + 1
    weights, versions, velocities = copied(initial), [copied(initial)], [[torch.zeros_like(w) for w in initial]]
    optimizer = make_optimizer(weights)

    def predicted(tensor: int, version: int, ahead: int) -> Tensor:
        now, velocity = versions[version][tensor], velocities[version][tensor]
        return now if smoothing is None else now + ahead * velocity

    for t, batch in enumerate(batches, 1):
        seen, used = [], []
        for tensor in range(len(initial)):
            stage = stage_of[tensor // 2]
            between, after = n - 1 - stage, stage // 2
            seen.append(predicted(tensor, max(0, t - 1 - between), between + after))
            used.append(predicted(tensor, t - 1, after))
        step(optimizer, weights, gradient(seen, used, batch))
        velocities.append(
            [
                torch.lerp(v, new - old, 1 - (smoothing or 0.0))
                for v, new, old in zip(velocities[-1], weights, versions[-1], strict=True)
            ]
        )
        versions.append(copied(weights))
    return weights


def reference_of(
    settings: Mapping[str, Any],
    initial: Weights,
    make_optimizer: MakeOptimizer,
    batches: Sequence[MiniBatch],
    stage_of: Sequence[int],
    smoothing: float,
) -> Weights:
    """Trains by the algorithm of an engine's settings; ``smoothing`` is SpecTrain's."""
    known = dict(settings)
    algorithm, num_stages = known.pop("algorithm", "ea_pipe"), max(stage_of) + 1
    if algorithm == "ea_pipe":
        elastic = ElasticReplicas(initial, make_optimizer, known.pop("replicas", num_stages), **known)
        for batch in batches:
            elastic.train(batch)
        return elastic.master
    if algorithm == "pipedream":
        return pipedream(initial, make_optimizer, batches, num_stages)
    if algorithm == "weight_stashing":
        return weight_stashing(initial, make_optimizer, batches, stage_of)
    return one_version(initial, make_optimizer, batches, stage_of, smoothing if algorithm == "spectrain" else None)
