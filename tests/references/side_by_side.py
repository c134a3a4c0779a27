"""Pipelines side by side that a reference model attracts (AvgPipe), in one process, with plain tensors.

Synchronous EASGD (Zhang et al., NeurIPS 2015, Eqs. 5 and 6), whose workers are the pipelines: x and c attract each
other by alpha, c by all x at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.references.ea_pipe import Batch, ElasticReplicas, MakeOptimizer, Weights, copied, gradient, step


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
    given = initial, make_optimizer
    pipelines = [
        ElasticReplicas(*given, replicas, elastic_force) if replicas else TwoMicroBatches(*given)
        for _ in mini_batches[0]
    ]
    for t, of_pipelines in enumerate(mini_batches, 1):
        for pipeline, batch in zip(pipelines, of_pipelines, strict=True):
            pipeline.train(batch)
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


class TwoMicroBatches:
    """The weights of GPipe or 1F1B."""

    def __init__(self, initial: Weights, make_optimizer: MakeOptimizer) -> None:
        self.master = copied(initial)
        self.optimizer = make_optimizer(self.master)

    def train(self, batch: Batch) -> None:
        parts = list(zip(*(tensor.tensor_split(2) for tensor in batch), strict=True))
        step(self.optimizer, self.master, gradient(self.master, self.master, parts))
