"""Small models and data that need no download, the same in every process."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer


def seeded_mlp(seed: int = 0, batch_norm: bool = False) -> nn.Module:
    """A two-layer network from 6 inputs to 3 classes."""
    torch.manual_seed(seed)
    norm: list[nn.Module] = [nn.BatchNorm1d(10)] if batch_norm else []
    return nn.Sequential(nn.Linear(6, 10), *norm, nn.Tanh(), nn.Linear(10, 3))


def batch(step: int, rank: int, size: int = 8) -> tuple[Tensor, Tensor]:
    """The batch that `rank` sees at `step`; its scale varies, so that the gradient's norm does."""
    generator = torch.Generator().manual_seed(10_000 * rank + step)
    x = torch.randn(size, 6, generator=generator) * (1 + (step * 7 + rank * 3) % 5)
    y = (x.sum(dim=1) > 0).long() + (x[:, 0] > 1).long()
    return x, y


def loss(model: nn.Module, step: int, rank: int) -> Tensor:
    x, y = batch(step, rank)
    return nn.functional.cross_entropy(model(x), y)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda model: AdamW(model.parameters(), lr=0.01),
}


def state(model: nn.Module) -> dict[str, Tensor]:
    """The model's state, detached from it."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
