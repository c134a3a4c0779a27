"""What stand-ins of the model tell: what methods add to a step's computation, and which models they refuse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import median

from torch import nn

from lightning_pipesync.core.cluster import Cluster
from lightning_pipesync.core.work import DEFAULT_MB, Work
from lightning_pipesync.lab.bench.candidate import Candidate, lab_of, time_candidates
from lightning_pipesync.lab.bench.candidates import without_communication
from lightning_pipesync.lab.bench.models import stand_in
from lightning_pipesync.lab.plan.predictions import predict
from lightning_pipesync.lab.plan.replicas import EACH_RANK, Replicas
from lightning_pipesync.lab.plan.trials import candidate_of, gathered
from lightning_pipesync.methods.laboratory import Prediction, StandIn
from lightning_pipesync.training.registry import METHODS

#: Maximum bytes of a stand-in's weights, and the seconds in which they can be sent.
MOST_BYTES, MOST_SECONDS = 2**24, 0.25

#: Steps of a measurement, and measurements.
STEPS, ROUNDS = 4, 3


def measure_added(module: nn.Module, work: Work, cluster: Cluster, replicas: Replicas = EACH_RANK) -> dict[str, float]:
    """Returns by method the seconds that it adds to a step without communication, the same on all ranks; collective.

    Stand-ins of the model compute nothing. They have as many layers and tensors, of one value each, so that messages
    are small; the time of these is not counted. What depends on the size is measured with larger stand-ins. Methods
    that cannot train the stand-in are missing.
    """
    numbers = [parameter.numel() for parameter in module.parameters() if parameter.requires_grad]
    most, num_bytes = min(MOST_BYTES, MOST_SECONDS * cluster.bandwidth), 4 * len(numbers)
    scale = min(1.0, most / (4 * sum(numbers)))
    declared = {name: lab_of(name).stand_in(work, cluster, num_bytes) for name in METHODS}
    if replicas.mesh is None:  # FSDP2's own work is that of a step without communication
        waits = cluster.backend.all_reduce(num_bytes, cluster.world_size)
        declared["ddp"] = StandIn({"bucket_mb": DEFAULT_MB}, waits)
    stand_ins = {name: one for name, one in declared.items() if one is not None}
    small = _measure(module, 0.0, stand_ins, replicas)
    large = _measure(module, scale, {name: one for name, one in stand_ins.items() if one.waits is None}, replicas)
    seconds = {name: median(rounds) - (stand_ins[name].waits or 0.0) for name, rounds in small.items()}
    for name, rounds in large.items():
        if min(rounds) > max(small[name]):  # otherwise a large model would multiply noise
            seconds[name] += (median(rounds) - median(small[name])) / scale
    return {name: max(0.0, took) for name, took in seconds.items()}


def _measure(
    module: nn.Module, scale: float, stand_ins: Mapping[str, StandIn], replicas: Replicas
) -> dict[str, list[float]]:
    """Returns by method, for each round, what a step of a stand-in takes longer."""
    alone = without_communication(replicas.sharded(stand_in(module, scale)))
    candidates: dict[str, Candidate] = {alone.name: alone}
    for name, declared in stand_ins.items():
        try:
            model = replicas.sharded(stand_in(module, scale))
            candidates[name] = candidate_of(Prediction(name, declared.settings), model, replicas)
        except ValueError:  # on all ranks: too few layers for a pipeline, or a method that takes no shards
            continue
        candidates[name].name = name
        candidates[name].prepare()
    timed = time_candidates(candidates.values(), STEPS, ROUNDS, whole_periods=False)
    without = timed.pop(alone.name).seconds
    return {
        name: [took - other for took, other in zip(one.seconds, without, strict=True)] for name, one in timed.items()
    }


def with_refusals(work: Work, cluster: Cluster, module: nn.Module, replicas: Replicas = EACH_RANK) -> Work:
    """Returns the work with what methods refuse of all that would be predicted, until they refuse no more; collective.

    Each prediction's method is attached, with its settings, to a stand-in with as many layers and tensors. Work and
    cluster are the same on all ranks.
    """
    reasons: dict[str, str | None] = {}
    while new := [one for one in predict(work, cluster) if one.name not in reasons]:
        reasons |= {one.name: _refusal(one, module, replicas) for one in new}
        work = replace(work, refused={name: reason for name, reason in reasons.items() if reason is not None})
    return work


def _refusal(prediction: Prediction, module: nn.Module, replicas: Replicas) -> str | None:
    """Returns why a method refuses a model, the same on all ranks; None: it does not."""
    candidate, reason = None, None
    try:
        candidate = candidate_of(prediction, replicas.sharded(stand_in(module)), replicas)
    except ValueError as error:
        reason = str(error)
    first = next(filter(None, gathered(reason)), None)
    if candidate is not None:
        candidate.close()
    return first
