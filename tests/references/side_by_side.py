"""Pipelines side by side that a reference model attracts (AvgPipe), in one process, with plain tensors.

Synchronous EASGD (Zhang et al., NeurIPS 2015, Eqs. 5 and 6), whose workers are the pipelines: x and c attract each
other by alpha, c by all x at once.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tests.references.ea_pipe import Batch, ElasticReplicas, MakeOptimizer, Synchronous, copies


@torch.no_grad()
def attract(reference: nn.Module, pipelines: Sequence[nn.Module], force: float) -> None:
    for c, *of_all in zip(reference.parameters(), *(one.parameters() for one in pipelines), strict=True):
        differences = [x - c for x in of_all]
        for x, difference in zip(of_all, differences, strict=True):
            x.add_(difference, alpha=-force)
        c.add_(sum(differences[1:], differences[0]) / len(of_all), alpha=len(of_all) * force)


def side_by_side(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    mini_batches: Sequence[Sequence[Batch]],
    *,
    average_force: float,
    average_period: int = 1,
    replicas: int = 0,
    elastic_force: float = 0.5,
) -> list[Tensor]:
    """Returns the weights of the reference model.

    A pipeline is EA-Pipe with so many ``replicas``; 0: GPipe or 1F1B with two micro-batches.
    """
    reference = copy.deepcopy(model)
    pipelines = [
        ElasticReplicas(model, make_optimizer, n=replicas, elastic_force=elastic_force)
        if replicas
        else Synchronous(model, make_optimizer)
        for _ in mini_batches[0]
    ]
    for t, of_pipelines in enumerate(mini_batches, 1):
        for pipeline, batch in zip(pipelines, of_pipelines, strict=True):
            parts = list(zip(*(tensor.tensor_split(2) for tensor in batch), strict=True))
            pipeline.train(batch if replicas else parts)
        if t % average_period == 0:
            attract(reference, [pipeline.master for pipeline in pipelines], average_force)
    return copies(reference)
