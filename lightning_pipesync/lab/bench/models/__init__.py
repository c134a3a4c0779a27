"""What the benchmarks train: small models, those of ``transformers``, and emulated ones that sleep."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from lightning_pipesync.lab.bench.models import real
from lightning_pipesync.lab.bench.models.emulated import EmulatedModel, computation_seconds
from lightning_pipesync.lab.bench.models.networks import TABLES, ModelTable
from lightning_pipesync.lab.bench.models.real import BenchModel

__all__ = [
    "EMULATED",
    "TABLES",
    "BenchModel",
    "EmulatedModel",
    "ModelTable",
    "build_model",
    "computation_seconds",
    "model_names",
    "stand_in",
]

#: What the name of an emulated network begins with.
EMULATED = "emulated-"
_REAL: dict[str, Callable[..., BenchModel]] = {
    "transformer": real.transformer,
    "transformer-14m": partial(real.transformer, name="transformer-14m", hidden=512, heads=8),
    "cnn": real.cnn,
    "resnet50": real.resnet50,
    "bert-base": real.bert_base,
}


def model_names() -> list[str]:
    """Returns the names for :func:`build_model`."""
    return [*_REAL, *(EMULATED + name for name in TABLES)]


def build_model(
    name: str,
    *,
    batch_size: int | None = None,
    scale: float = 1.0,
    forward_seconds: float = 0.0,
    backward_seconds: float = 0.0,
) -> BenchModel:
    """Builds a model: ``resnet50`` computes, ``emulated-resnet50`` sleeps for as many seconds as given.

    ``scale`` is the number of values of an emulated model over the true number. The weights of a real model come from
    torch's global generator. ModuleNotFoundError if ``transformers`` builds the model and is not installed.
    """
    if name not in model_names():
        raise ValueError(f"model={name!r} is not known; there are {', '.join(model_names())}.")
    if name in _REAL:
        if (scale, forward_seconds, backward_seconds) != (1.0, 0.0, 0.0):
            raise ValueError(
                f"scale={scale!r}, forward_seconds={forward_seconds!r} and backward_seconds={backward_seconds!r} are "
                f"settings of emulated models: {name} has its true size, and takes the time that it needs."
            )
        if batch_size is None:
            return _REAL[name]()
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size!r}.")
        return _REAL[name](batch_size)
    if batch_size is not None:
        raise ValueError(f"batch_size={batch_size!r}: {name} has none; set its forward_seconds and backward_seconds.")
    module = EmulatedModel(
        TABLES[name.removeprefix(EMULATED)](),
        scale,
        forward_seconds=forward_seconds,
        backward_seconds=backward_seconds,
    )
    return _emulated(name, module)


def stand_in(model: nn.Module, scale: float = 0.0) -> BenchModel:
    """Returns a model with as many layers and trainable tensors as another, on its device, that takes no time.

    A tensor has ``scale`` times as many values as the other model's, and at least one.
    """
    table, seen = ModelTable(type(model).__name__), set[Tensor]()
    for name, module in model.named_modules():
        held = [p for p in module.parameters(recurse=False) if p.requires_grad and p not in seen]
        seen |= set(held)
        if held:
            sizes = [max(1, round(scale * tensor.numel())) for tensor in held]
            table.block = name
            table.add("", 1, **{f"tensor{i}": (size,) for i, size in enumerate(sizes)})
    module = EmulatedModel(table, forward_seconds=0.0, backward_seconds=0.0)
    return _emulated("stand-in", module).to(next(model.parameters()).device)


def _emulated(name: str, module: EmulatedModel) -> BenchModel:
    return BenchModel(name, module, list(module), _value_of_rank, _half_square)


def _value_of_rank(rank: int) -> Tensor:
    """Returns the batch of an emulated model, a 0-dim tensor that is also its gradient with ``_half_square``."""
    return torch.tensor(float(rank + 1))


def _half_square(module: nn.Module, batch: Tensor) -> Tensor:
    output: Tensor = module(batch)
    return output.square() / 2
