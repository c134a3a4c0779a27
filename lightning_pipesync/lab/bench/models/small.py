"""Small real models that need no download: a language model and an image classifier."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_pipesync.lab.bench.models.bench_model import BenchModel

_VOCABULARY, _TOKENS = 1024, 64
_NUM_CLASSES, _IMAGE = 10, (3, 32, 32)


class TransformerLM(nn.Module):
    """A causal Transformer (pre-norm) that predicts the next token.

    Args:
        hidden: width of the residual stream.
        depth: number of layers.
        heads: attention heads of each.
        vocabulary: number of different tokens.
        length: of a sequence at most.
    """

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
    """Three stages of convolution, batch norm and pooling, then a classifier of images of 3 x 32 x 32."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        channels = [_IMAGE[0], width, 2 * width, 4 * width]
        self.stages = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(),
                nn.MaxPool2d(2),
            )
            for inputs, outputs in pairwise(channels)
        )
        self.head = nn.Linear(channels[-1], _NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits (batch, 10) for ``images`` (batch, 3, 32, 32)."""
        for stage in self.stages:
            images = stage(images)
        logits: Tensor = self.head(images.mean(dim=(2, 3)))
        return logits


def transformer(batch_size: int = 8) -> BenchModel:
    """Returns a :class:`TransformerLM` of 3.7 million values, on random sequences of 64 tokens."""

    def make_batch(rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(rank)
        return torch.randint(_VOCABULARY, (batch_size, _TOKENS + 1), generator=generator)

    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        return cross_entropy(module(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    module = TransformerLM()
    return BenchModel("transformer", module, list(module.layers), make_batch, loss)


def cnn(batch_size: int = 32) -> BenchModel:
    """Returns a :class:`SmallCNN` of 0.1 million values, on random images of 3 x 32 x 32."""
    module = SmallCNN()
    return BenchModel(
        "cnn",
        module,
        list(module.stages),
        lambda rank: random_images(rank, batch_size, _IMAGE, _NUM_CLASSES),
        _classify,
    )


def random_images(rank: int, batch_size: int, shape: tuple[int, ...], num_classes: int) -> tuple[Tensor, Tensor]:
    """Returns images (batch_size, *shape) and labels (batch_size), those of this rank."""
    generator = torch.Generator().manual_seed(rank)
    images = torch.randn(batch_size, *shape, generator=generator)
    return images, torch.randint(num_classes, (batch_size,), generator=generator)


def _classify(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return cross_entropy(module(images), labels)
