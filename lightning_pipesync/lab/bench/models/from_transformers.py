"""Networks of realistic size, which ``transformers`` builds from their configurations, without a download."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_pipesync.lab.bench.models.bench_model import BenchModel
from lightning_pipesync.lab.bench.models.small import random_images

_NUM_CLASSES = 1000
_TOKENS = 64


def resnet50(batch_size: int = 4) -> BenchModel:
    """Returns ResNet-50 on random images of 3 x 224 x 224, 1000 classes (DeAR Section VI-A); its layers: the blocks.

    Raises:
        ModuleNotFoundError: ``transformers`` is not installed.
    """
    transformers = _transformers("resnet50")

    def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return cross_entropy(module(images).logits, labels)

    module = transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=_NUM_CLASSES))
    return BenchModel(
        "resnet50",
        module,
        [block for stage in module.resnet.encoder.stages for block in stage.layers],
        lambda rank: random_images(rank, batch_size, (3, 224, 224), _NUM_CLASSES),
        loss,
    )


def bert_base(batch_size: int = 4) -> BenchModel:
    """Returns BERT-Base with its pre-training heads on random sentences of 64 tokens (DeAR Section VI-A).

    Every token is a target, and dropout is on, as in training.

    Raises:
        ModuleNotFoundError: ``transformers`` is not installed.
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


def _transformers(name: str) -> Any:
    """Imports and returns the package, which is needed for its models only."""
    try:
        return import_module("transformers")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"The model {name} needs transformers: pip install transformers") from error
