"""Measures what the ranks compute in a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipesync.core.dtensors import ShardedOptimizers, is_sharded, local_of
from lightning_pipesync.core.torch_private import tensors_in
from lightning_pipesync.core.work import MethodWork, Work
from lightning_pipesync.lab.bench.candidate import inputs_of, lab_of
from lightning_pipesync.lab.bench.candidates import without_communication
from lightning_pipesync.lab.bench.models import BenchModel
from lightning_pipesync.lab.bench.profile import profile_step
from lightning_pipesync.lab.plan.replicas import bytes_by_group
from lightning_pipesync.lab.plan.text import milliseconds
from lightning_pipesync.training.registry import METHODS

#: A rank is slow whose computation takes longer than a median rank's by more than this share of it, than this share of
#: a step of DDP, and than these seconds, which are noise.
SLOW_SHARE, SHARE_OF_STEP, NOISE_S = 0.15, 0.05, 0.005


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


def slow_ranks(everyones: Sequence[Work], names: Sequence[str], step: float) -> list[str]:
    """Returns which ranks are slow, one sentence each; ``step`` is the seconds of a step of DDP."""
    seconds = [work.seconds for work in everyones]
    usual, others = sorted(seconds)[(len(seconds) - 1) // 2], "the other" if len(seconds) == 2 else "most"
    return [
        f"{name}: its computation takes {milliseconds(took)}, and that of {others} {milliseconds(usual)}: all others "
        "wait for it. Look for other processes there, too many threads, or a slower processor."
        for name, took in zip(names, seconds, strict=True)
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
