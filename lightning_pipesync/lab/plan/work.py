"""Measures what the ranks compute in a step, and with stand-ins of the model what methods add to it, and refuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipesync.core.dtensors import ShardedOptimizers, is_sharded, local_of
from lightning_pipesync.core.torch_private import tensors_in
from lightning_pipesync.lab.bench.candidates import Candidate, inputs_of, time_candidates, without_communication
from lightning_pipesync.lab.bench.models import BenchModel, stand_in
from lightning_pipesync.lab.bench.preflight import HostFacts
from lightning_pipesync.lab.bench.timing import profile_step
from lightning_pipesync.lab.plan.model import EACH_RANK, Replicas, bytes_by_group
from lightning_pipesync.lab.plan.predictions import predict
from lightning_pipesync.lab.plan.text import milliseconds
from lightning_pipesync.lab.plan.trials import candidate_of, gathered
from lightning_pipesync.lab.predictions.cluster import Cluster
from lightning_pipesync.lab.predictions.entry import Prediction, StandIn
from lightning_pipesync.lab.predictions.registry import lab_of
from lightning_pipesync.lab.predictions.work import DEFAULT_MB, MethodWork, Work
from lightning_pipesync.training.registry import METHODS

#: A rank is slow whose computation takes longer than a median rank's by more than this share of it, than this share of
#: a step of DDP, and than these seconds, which are noise.
SLOW_SHARE, SHARE_OF_STEP, NOISE_S = 0.15, 0.05, 0.005

#: Maximum bytes of a stand-in's weights, and the seconds in which they can be sent.
MOST_BYTES, MOST_SECONDS = 2**24, 0.25

#: Steps of a measurement, and measurements.
STEPS, ROUNDS = 4, 3


def measure_work(model: BenchModel) -> Work:
    """Measures what a step takes on this rank; a collective call, as all ranks are to compute at the same time.

    Of a model that is sharded, what FSDP2 does within the replica is part of it.
    """
    dist.barrier()
    candidate = without_communication(model)
    profile = profile_step(candidate)
    measured = measured_by_methods(candidate.module, candidate.optimizer, lambda: inputs_of(model, candidate.batch))
    groups = bytes_by_group(model.module)
    return Work(profile, measured, activation_bytes=activation_bytes(model, candidate.batch), groups=groups)


def slowest(everyones: Sequence[Work]) -> Work:
    """Returns the work of the rank whose computation takes longest, with what the others' is beside it."""
    longest = max(everyones, key=lambda work: work.seconds)
    together = len(everyones) / sum(1 / work.seconds for work in everyones)
    measured = {
        name: replace(
            of_longest,
            seconds=max(work.measured_by(name).seconds for work in everyones),
            low_rank_seconds=max(work.measured_by(name).low_rank_seconds for work in everyones),
        )
        for name, of_longest in longest.measured.items()
    }
    return replace(longest, measured=measured, pace=together / longest.seconds)


def slow_ranks(everyones: Sequence[Work], facts: Sequence[HostFacts], step: float) -> list[str]:
    """Returns which ranks are slow, and what to do; ``step`` is the seconds of a step of DDP."""
    seconds = [work.seconds for work in everyones]
    usual, others = sorted(seconds)[(len(seconds) - 1) // 2], "the other" if len(seconds) == 2 else "most"

    def advice(host: HostFacts) -> str:
        if any(one.host == host.host and one.address != host.address for one in facts):  # as in `pipesync netlab`
            return (
                f"These hosts are emulated, and share the {host.cores} cores of {host.host}: measure again while "
                "nothing else runs there."
            )
        return "Look for other processes there, too many threads, or a slower processor."

    return [
        f"{host.name}: its computation takes {milliseconds(took)}, and that of {others} {milliseconds(usual)}: all "
        f"others wait for it. {advice(host)}"
        for host, took in zip(facts, seconds, strict=True)
        if took - usual > max(SLOW_SHARE * usual, SHARE_OF_STEP * step, NOISE_S)
    ]


def activation_bytes(model: BenchModel, batch: Any) -> int:
    """Returns the bytes that a forward pass keeps for the backward pass, besides weights, buffers and the batch.

    0 if that is unknown: some transforms of ``torch.func`` do not allow to look.
    """
    module = model.module
    given = {
        one.untyped_storage().data_ptr()
        for one in (*map(local_of, module.parameters()), *module.buffers(), *tensors_in(batch))
    }
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model.loss(module, batch)
    except RuntimeError:
        return 0
    del loss
    return sum(num_bytes for address, num_bytes in kept.items() if address not in given)


def measured_by_methods(
    module: nn.Module, optimizer: Optimizer, inputs: Callable[[], Any] | None
) -> dict[str, MethodWork]:
    """Returns by method what it measures of the model, and of the gradients that a step has left."""
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    measured = {}
    with ExitStack() as stack:
        if is_sharded(module):
            stack.callback(ShardedOptimizers([optimizer]).release)
        for name, method in METHODS.items():
            if method.makes_passes and is_sharded(module):  # it divides a model in another way
                continue
            for parameter, gradient in gradients:
                parameter.grad = gradient  # also after a method that has zeroed it
            if (found := lab_of(name).measure(module, optimizer, inputs)) != MethodWork():
                measured[name] = found
    return measured


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
