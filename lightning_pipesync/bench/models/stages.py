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

    Attributes:
        spans: ``"forward"`` or ``"backward"`` and when it began and ended (``time.perf_counter``), of every pass that
            was made in this process.
    """

    def __init__(self, num_stages: int, batch_size: int, *, forward_seconds: float, backward_seconds: float) -> None:
        pacer = Pacer(forward_seconds, backward_seconds)
        spans: list[tuple[str, float, float]] = []
        super().__init__(*(EmulatedStage(batch_size, pacer, spans) for _ in range(num_stages)))
        self.spans = spans


class EmulatedStage(nn.Module):
    """The layer of one stage; with a weight, so that there is something to train."""

    def __init__(self, batch_size: int, pacer: Pacer, spans: list[tuple[str, float, float]]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.batch_size, self.pacer, self.spans = batch_size, pacer, spans

    def forward(self, x: Tensor) -> Tensor:
        begin = time.perf_counter()
        x = _Compute.apply(x, self.weight, self)
        self.spend("forward", len(x), begin)
        return x

    def spend(self, kind: str, samples: int, begin: float) -> None:
        """Takes the time of a pass that has begun."""
        seconds = self.pacer.forward_seconds if kind == "forward" else self.pacer.backward_seconds
        self.pacer.spend(samples / self.batch_size * seconds, begin)
        self.spans.append((kind, begin, time.perf_counter()))


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stage: EmulatedStage) -> Tensor:
        ctx.stage = stage
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.stage.spend("backward", len(gradient), time.perf_counter())
        return gradient, torch.ones(()), None
