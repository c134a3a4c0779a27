"""A replica's model, whose layers sleep, and a step of its training."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.lab.bench.emulated import EmulatedModel, LayerSpec, ModelTable

#: The model's layers, all of the same size.
LAYERS = 6


def build(mib: float, step_s: float) -> EmulatedModel:
    """Returns a model with ``mib`` MiB of fp32 parameters, of which a step computes for ``step_s`` seconds."""
    table = ModelTable("replica")
    shape = (max(1, round(mib * MIB / 4 / LAYERS)),)
    table.layers += [LayerSpec(f"layer{number}", f"layer{number}", {"weight": shape}, 1) for number in range(LAYERS)]
    return EmulatedModel(table, forward_seconds=step_s / 3, backward_seconds=step_s * 2 / 3)


def take_steps(model: nn.Module, update: Callable[[], object], number: int, gradient: float = 1e-3) -> None:
    """Trains for some steps, each of which ends with ``update``; all values of all gradients are ``gradient``."""
    for _ in range(number):
        for parameter in model.parameters():
            parameter.grad = None
        (model(torch.tensor(gradient)) ** 2 / 2).backward()
        update()
