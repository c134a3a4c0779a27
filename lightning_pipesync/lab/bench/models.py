"""What the benchmarks train, without downloads: small models, two of ``transformers``, and emulated ones that sleep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from lightning_pipesync.core.extras import check_extra
from lightning_pipesync.core.torch_private import map_tensors
from lightning_pipesync.lab.bench.emulated import TABLES, EmulatedModel, ModelTable
from lightning_pipesync.lab.bench.emulated import computation_seconds as computation_seconds

#: What the name of an emulated network begins with.
EMULATED = "emulated-"
_VOCABULARY, _TOKENS = 1024, 64


@dataclass(frozen=True)
class BenchModel:
    """A module with its batches and its loss."""

    #: The name in tables.
    name: str
    module: nn.Module  #: in fp32
    #: Its parts for ``fully_shard`` of FSDP2, in the order of execution.
    layers: list[nn.Module]
    #: Returns the batch of a rank, the same in every call.
    make_batch: Callable[[int], Any]
    #: Returns the loss (0-dim) of the module on a batch.
    loss: Callable[[nn.Module, Any], Tensor]
    #: Returns the optimizer of the module; None: that of all candidates.
    optimizer: Callable[[nn.Module], Optimizer] | None = None

    def to(self, device: torch.device | str) -> BenchModel:
        """Returns the model with its module, which is moved, and its batches on a device."""
        if torch.device(device).type == "cpu":
            return self

        def make_batch(rank: int) -> Any:
            return map_tensors(lambda tensor: tensor.to(device), self.make_batch(rank))

        return replace(self, module=self.module.to(device), make_batch=make_batch)


class TransformerLM(nn.Module):
    """A causal Transformer (pre-norm) that predicts the next token of at most ``length``."""

    def __init__(
        self, hidden: int = 256, depth: int = 4, heads: int = 4, vocabulary: int = _VOCABULARY, length: int = _TOKENS
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(length, hidden)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(hidden, heads, 4 * hidden, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns logits (batch, length, vocabulary) for ``tokens`` (batch, length)."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.tokens(tokens) + self.positions.weight[:length]
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(self.norm(x))
        return logits


class SmallCNN(nn.Module):
    """Three stages of convolution, batch norm and pooling, then a classifier of images of 3 x 32 x 32 in 10 classes."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(),
                nn.MaxPool2d(2),
            )
            for inputs, outputs in pairwise([3, width, 2 * width, 4 * width])
        )
        self.head = nn.Linear(4 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits (batch, 10) for ``images`` (batch, 3, 32, 32)."""
        for stage in self.stages:
            images = stage(images)
        logits: Tensor = self.head(images.mean(dim=(2, 3)))
        return logits


def transformer(batch_size: int = 8, name: str = "transformer", **sizes: int) -> BenchModel:
    """Returns a :class:`TransformerLM` of ``sizes``, of 3.7 million values if none are given.

    It trains on random sequences of 64 tokens.
    """

    def make_batch(rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(rank)
        return torch.randint(_VOCABULARY, (batch_size, _TOKENS + 1), generator=generator)

    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        return cross_entropy(module(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    module = TransformerLM(**sizes)
    return BenchModel(name, module, list(module.layers), make_batch, loss)


def cnn(batch_size: int = 32) -> BenchModel:
    """Returns a :class:`SmallCNN` of 0.1 million values, on random images of 3 x 32 x 32."""
    module = SmallCNN()
    return _classifier("cnn", module, list(module.stages), (batch_size, 3, 32, 32), 10)


def resnet50(batch_size: int = 4) -> BenchModel:
    """Returns ResNet-50 on random images of 3 x 224 x 224, 1000 classes (DeAR Section VI-A); its layers: the blocks."""
    transformers = _transformers("resnet50")
    module = transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=1000))
    blocks = [block for stage in module.resnet.encoder.stages for block in stage.layers]
    return _classifier("resnet50", module, blocks, (batch_size, 3, 224, 224), 1000)


def bert_base(batch_size: int = 4) -> BenchModel:
    """Returns BERT-Base with its pre-training heads on random sentences of 64 tokens (DeAR Section VI-A).

    Every token is a target, and dropout is on, as in training.
    """
    transformers = _transformers("bert-base")
    config = transformers.BertConfig()

    def make_batch(rank: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(rank)
        draw = torch.randint(config.vocab_size, (2, batch_size, _TOKENS), generator=generator)
        follows = torch.randint(2, (batch_size,), generator=generator)
        return {"input_ids": draw[0], "labels": draw[1], "next_sentence_label": follows}

    def loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        value: Tensor = module(**batch).loss
        return value

    module = transformers.BertForPreTraining(config)
    return BenchModel("bert-base", module, list(module.bert.encoder.layer), make_batch, loss)


def _classifier(
    name: str, module: nn.Module, layers: list[nn.Module], shape: tuple[int, ...], num_classes: int
) -> BenchModel:
    """Returns a classifier on random images, those of each rank, of a shape (batch, channels, height, width)."""

    def make_batch(rank: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(rank)
        images = torch.randn(*shape, generator=generator)
        return images, torch.randint(num_classes, shape[:1], generator=generator)

    def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        output = module(batch[0])
        return cross_entropy(getattr(output, "logits", output), batch[1])

    return BenchModel(name, module, layers, make_batch, loss)


def _transformers(name: str) -> Any:
    """Imports and returns the package, which is needed for its models only."""
    check_extra("transformers", f"The model {name}", "transformers")
    return import_module("transformers")


_REAL: dict[str, Callable[..., BenchModel]] = {
    "transformer": transformer,
    "transformer-14m": partial(transformer, name="transformer-14m", hidden=512, heads=8),
    "cnn": cnn,
    "resnet50": resnet50,
    "bert-base": bert_base,
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
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size!r}.")
        return _REAL[name]() if batch_size is None else _REAL[name](batch_size)
    if batch_size is not None:
        raise ValueError(f"batch_size={batch_size!r}: {name} has none; set its forward_seconds and backward_seconds.")
    table = TABLES[name.removeprefix(EMULATED)]()
    compute = {"forward_seconds": forward_seconds, "backward_seconds": backward_seconds}
    return _emulated(name, EmulatedModel(table, scale, **compute))


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
