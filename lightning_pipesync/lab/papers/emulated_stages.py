"""Stages of a pipeline whose layers sleep instead of computing."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipesync.lab.bench.models.emulated_compute import EmulatedCompute


class EmulatedStages(nn.Sequential):
    """One equal layer per stage, which takes time and returns activations of the size of its input.

    The time is proportional to the number of samples, as on an accelerator that any number keeps busy.

    Args:
        num_stages: the number of stages.
        batch_size: samples of a mini-batch.
        forward_seconds: the duration of the forward pass of a mini-batch in a stage.
        backward_seconds: the duration of its backward pass.

    Attributes:
        spans: ``"forward"`` or ``"backward"`` and the start and end (``time.perf_counter``) of every pass in this
            process.
    """

    def __init__(self, num_stages: int, batch_size: int, *, forward_seconds: float, backward_seconds: float) -> None:
        compute = EmulatedCompute(forward_seconds, backward_seconds)
        spans: list[tuple[str, float, float]] = []
        super().__init__(*(EmulatedStage(batch_size, compute, spans) for _ in range(num_stages)))
        self.spans = spans


class EmulatedStage(nn.Module):
    """The layer of one stage, with one trainable weight."""

    def __init__(self, batch_size: int, compute: EmulatedCompute, spans: list[tuple[str, float, float]]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.batch_size, self.compute, self.spans = batch_size, compute, spans

    def forward(self, x: Tensor) -> Tensor:
        begin = time.perf_counter()
        x = _Compute.apply(x, self.weight, self)
        self.spend("forward", len(x), begin)
        return x

    def spend(self, kind: str, samples: int, begin: float) -> None:
        """Takes the time of a pass that has started at ``begin``."""
        seconds = self.compute.forward_seconds if kind == "forward" else self.compute.backward_seconds
        self.compute.spend(samples / self.batch_size * seconds, begin)
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
