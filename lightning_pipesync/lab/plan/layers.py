"""The layers of a model that a pipeline would split into stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import nn

from lightning_pipesync.core.layers import flattened, measure
from lightning_pipesync.core.parameters import device_of
from lightning_pipesync.lab.bench.models import BenchModel


@dataclass(frozen=True)
class LayerWork:
    """What one layer takes.

    Attributes:
        seconds: of both passes of a mini-batch.
        parameter_bytes: of its parameters.
        output_bytes: of its output for a mini-batch.
    """

    seconds: float
    parameter_bytes: int
    output_bytes: int


def is_chain(module: nn.Module) -> TypeGuard[nn.Sequential]:
    """Returns whether a module runs its members one after the other."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def measure_layers(model: BenchModel, batch: Any) -> list[LayerWork]:
    """Measures the layers of an ``nn.Sequential``; there are none of another module, which EA-Pipe has to trace."""
    if not is_chain(model.module):
        return []
    layers = [layer for _, layer in flattened(model.module)]
    seconds, num_bytes = measure(layers, inputs_of(model, batch), device_of(model.module))
    parameters = [sum(parameter.nbytes for parameter in layer.parameters()) for layer in layers]
    return [LayerWork(s, p, int(n) - p) for s, p, n in zip(seconds, parameters, num_bytes, strict=True)]


def inputs_of(model: BenchModel, batch: Any) -> Any:
    """Returns what the loss of a model gives the module; runs a forward pass."""
    inputs: list[Any] = []
    handle = model.module.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    try:
        with torch.no_grad():
            model.loss(model.module, batch)
    finally:
        handle.remove()
    return inputs[0]
