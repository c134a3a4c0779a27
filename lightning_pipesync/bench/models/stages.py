"""Stages of a pipeline whose layers sleep where an accelerator would compute."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipesync.bench.models.pacer import Pacer


class EmulatedStages(nn.Sequential):
    """One layer for each stage, all alike: it takes time, and passes on activations of the size of its input.

    The time is in proportion to the number of samples, as if an accelerator were busy with any of them.

    Args:
        num_stages: how many.
        batch_size: samples of a mini-batch.
        forward_seconds: what the forward pass of a mini-batch takes in a stage.
        backward_seconds: what its backward pass takes.
    """

    def __init__(self, num_stages: int, batch_size: int, *, forward_seconds: float, backward_seconds: float) -> None:
        pacer = Pacer(forward_seconds, backward_seconds)
        super().__init__(*(EmulatedStage(batch_size, pacer) for _ in range(num_stages)))


class EmulatedStage(nn.Module):
    """The layer of one stage; with a weight, so that there is something to train."""

    def __init__(self, batch_size: int, pacer: Pacer) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.batch_size, self.pacer = batch_size, pacer

    def forward(self, x: Tensor) -> Tensor:
        begin = time.perf_counter()
        x = _Compute.apply(x, self.weight, self)
        self.pacer.spend(len(x) / self.batch_size * self.pacer.forward_seconds, begin)
        return x


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stage: EmulatedStage) -> Tensor:
        ctx.stage = stage
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        begin, stage = time.perf_counter(), ctx.stage
        stage.pacer.spend(len(gradient) / stage.batch_size * stage.pacer.backward_seconds, begin)
        return gradient, torch.ones(()), None
