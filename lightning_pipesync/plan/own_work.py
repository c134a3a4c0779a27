"""What methods add to a step's computation: hooks, copies of many small tensors, bookkeeping."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median

import torch.distributed as dist
from torch import nn

from lightning_pipesync.bench.candidate import Candidate
from lightning_pipesync.bench.candidates import without_communication
from lightning_pipesync.bench.models import stand_in
from lightning_pipesync.bench.round_robin import time_round_robin
from lightning_pipesync.plan.candidates import candidate_of
from lightning_pipesync.plan.cluster import Cluster
from lightning_pipesync.plan.predictions import Prediction

#: Methods that exchange gradients in each step, with settings that matter for what else they do.
EXCHANGING = (
    Prediction("ddp", {"bucket_mb": 25.0}),
    Prediction("dear", {"fusion": "buffer"}),
    Prediction("pipe_sgd", {"delay_compensation": "none"}),
)

#: Methods whose steps here exchange little, whatever the size of the model.
OTHERS = (
    Prediction("selsync", {"lssr": 0.99, "outer_momentum": 0.3}),
    Prediction("local_sgd", {"period": 10**6}),
    Prediction("ea_pipe", {"split": "parameters"}),
)

#: The most bytes of a stand-in's weights.
MOST_BYTES = 2**24

#: Steps of a measurement, and measurements.
STEPS, ROUNDS = 4, 3


def measure_own_work(module: nn.Module, cluster: Cluster) -> dict[str, float]:
    """Measures what a step takes longer with each method than without communication; a collective call.

    Stand-ins of the model compute nothing. They have as many layers and tensors, of one value each, so that messages
    are small; what these take is not counted. What depends on the size is measured where steps exchange little.

    Args:
        module: the model.
        cluster: the costs of communication.

    Returns:
        Seconds of a step by method, of those that can train the stand-in; the same on all ranks.
    """
    sizes = [parameter.numel() for parameter in module.parameters() if parameter.requires_grad]
    scale = min(1.0, MOST_BYTES / (4 * sum(sizes)))
    num_bytes, world_size = 4 * len(sizes), dist.get_world_size()
    seconds = _measure(module, 0.0, (*EXCHANGING, *OTHERS))
    seconds["ddp"] -= cluster.backend.all_reduce(num_bytes, world_size)
    seconds["dear"] -= cluster.halves.all_reduce(num_bytes, world_size)
    for name, took in _measure(module, scale, OTHERS).items():
        seconds[name] += max(0.0, took - seconds[name]) / scale
    return {name: max(0.0, took) for name, took in seconds.items()}


def _measure(module: nn.Module, scale: float, methods: Sequence[Prediction]) -> dict[str, float]:
    """Returns by method what a step of a stand-in takes longer."""
    alone = without_communication(stand_in(module, scale))
    candidates: dict[str, Candidate] = {alone.name: alone}
    for one in methods:
        try:
            candidates[one.method] = candidate_of(one, stand_in(module, scale))
        except ValueError:  # on all ranks: too few layers for a pipeline
            continue
        candidates[one.method].prepare()

    def run(name: str) -> None:
        for _ in range(STEPS):
            candidates[name].step()

    timed = time_round_robin(
        {name: partial(run, name) for name in candidates},
        ROUNDS,
        before=lambda name: candidates[name].begin(),
        after=lambda name: candidates[name].drain(),
    )
    for candidate in candidates.values():
        candidate.close()
    seconds = {name: median(of_rounds.seconds) / STEPS for name, of_rounds in timed.items()}
    without = seconds.pop(alone.name)
    return {name: took - without for name, took in seconds.items()}
