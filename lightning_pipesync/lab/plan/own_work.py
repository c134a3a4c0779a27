"""What methods add to a step's computation: hooks, copies of many small tensors, bookkeeping."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median

from torch import nn

from lightning_pipesync.lab.bench.candidate import Candidate
from lightning_pipesync.lab.bench.candidates import without_communication
from lightning_pipesync.lab.bench.models import stand_in
from lightning_pipesync.lab.bench.round_robin import time_round_robin
from lightning_pipesync.lab.plan.candidates import candidate_of
from lightning_pipesync.lab.plan.cluster import Cluster
from lightning_pipesync.lab.plan.predictions import Prediction

#: Methods that exchange gradients in each step, with settings that matter for what else they do.
EXCHANGING = (
    Prediction("ddp", {"bucket_mb": 25.0}),
    Prediction("dear", {"fusion": "buffer"}),
    Prediction("pipe_sgd", {"delay_compensation": "none"}),
)

#: Methods of which most steps exchange little, so that stand-ins may be larger; and pipelines.
OTHERS = (
    Prediction("selsync", {"lssr": 0.99, "outer_momentum": 0.3}),
    Prediction("local_sgd", {"period": 10**6}),
)
PIPELINES = (Prediction("ea_pipe", {"split": "parameters"}),)

#: The most bytes of a stand-in's weights, and the seconds in which they can be sent.
MOST_BYTES, MOST_SECONDS = 2**24, 0.25

#: Steps of a measurement, and measurements.
STEPS, ROUNDS = 4, 3


def measure_own_work(module: nn.Module, cluster: Cluster, pipelines: bool) -> dict[str, float]:
    """Measures what a step takes longer with each method than without communication; a collective call.

    Stand-ins of the model compute nothing. They have as many layers and tensors, of one value each, so that messages
    are small; what these take is not counted. What depends on the size is measured with larger ones.

    Args:
        module: the model.
        cluster: the costs of communication.
        pipelines: whether pipelines are planned.

    Returns:
        Seconds of a step by method, of those that can train the stand-in; the same on all ranks.
    """
    numbers = [parameter.numel() for parameter in module.parameters() if parameter.requires_grad]
    most = min(MOST_BYTES, MOST_SECONDS * cluster.bandwidth)
    scale, num_bytes = min(1.0, most / (4 * sum(numbers))), 4 * len(numbers)
    others = (*OTHERS, *PIPELINES) if pipelines else OTHERS
    small, large = _measure(module, 0.0, (*EXCHANGING, *others)), _measure(module, scale, others)
    waits = {
        "ddp": cluster.backend.all_reduce(num_bytes, cluster.world_size),
        "dear": cluster.halves.all_reduce(num_bytes, cluster.world_size),
        "pipe_sgd": cluster.all_reduces["none"].all_reduce(num_bytes, cluster.world_size),
    }
    seconds = {name: median(rounds) - waits.get(name, 0.0) for name, rounds in small.items()}
    for name, rounds in large.items():
        if min(rounds) > max(small[name]):  # otherwise a large model would multiply noise
            seconds[name] += (median(rounds) - median(small[name])) / scale
    return {name: max(0.0, took) for name, took in seconds.items()}


def _measure(module: nn.Module, scale: float, methods: Sequence[Prediction]) -> dict[str, list[float]]:
    """Returns by method, for each round, what a step of a stand-in takes longer."""
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
    without = timed.pop(alone.name).seconds
    return {
        name: [(took - other) / STEPS for took, other in zip(one.seconds, without, strict=True)]
        for name, one in timed.items()
    }
