"""Pipelines side by side that a reference model attracts (AvgPipe), in one process, with plain tensors.

Synchronous EASGD (Zhang et al., NeurIPS 2015, Eqs. 5 and 6), whose workers are the pipelines: x and c attract each
other by alpha, c by all x at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from tests.references.ea_pipe import Batch, MakeOptimizer, Weights, copied, gradient, step


def side_by_side(
    initial: Weights,
    make_optimizer: MakeOptimizer,
    mini_batches: Sequence[Sequence[Batch]],
    *,
    average_force: float,
    average_period: int = 1,
    replicas: int = 0,
    elastic_force: float = 0.5,
) -> Weights:
    """The reference model. A pipeline is EA-Pipe with so many ``replicas``; 0: GPipe or 1F1B with two micro-batches."""
    reference = copied(initial)
    pipelines = [Pipeline(initial, make_optimizer, replicas, elastic_force) for _ in mini_batches[0]]
    for t, of_pipelines in enumerate(mini_batches, 1):
        for pipeline, batch in zip(pipelines, of_pipelines, strict=True):
            pipeline.train(t, batch)
        if t % average_period == 0:
            force = average_force
            differences = [[x - c for x, c in zip(one.master, reference, strict=True)] for one in pipelines]
            for one, difference in zip(pipelines, differences, strict=True):
                for x, d in zip(one.master, difference, strict=True):
                    x.add_(d, alpha=-force)
            for c, of_all in zip(reference, zip(*differences, strict=True), strict=True):
                mean = sum(of_all[1:], of_all[0]) / len(pipelines)
                c.add_(mean, alpha=len(pipelines) * force)
    return reference


class Pipeline:
    """One pipeline's weights."""

    def __init__(self, initial: Weights, make_optimizer: MakeOptimizer, replicas: int, elastic_force: float) -> None:
        self.master, self.force = copied(initial), elastic_force
        self.replicas = [copied(initial) for _ in range(replicas)]
        self.optimizers: list[Optimizer] = [make_optimizer(weights) for weights in self.replicas or [self.master]]

    def train(self, t: int, batch: Batch) -> None:
        if not self.replicas:
            parts = list(zip(*(tensor.tensor_split(2) for tensor in batch), strict=True))
            step(self.optimizers[0], self.master, gradient(self.master, self.master, parts))
            return
        i = (t - 1) % len(self.replicas)
        step(self.optimizers[i], self.replicas[i], gradient(self.replicas[i], self.replicas[i], batch))
        for x, c in zip(self.replicas[i], self.master, strict=True):  # EA-Pipe, Eq. 1
            with torch.no_grad():
                difference = x - c
                x -= self.force * difference
                c += self.force * difference
