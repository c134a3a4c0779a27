"""Generated noisy curves, after the idea of MNIST-1D (Greydanus and Kobak, arXiv 2011.14439)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Adam
from torch.optim.lr_scheduler import ConstantLR
from torch.utils.data import TensorDataset

from benchmarks.tasks.task import Task

_NUM_CLASSES, _NUM_KNOTS, _LENGTH = 10, 12, 40
_NUM_TRAINED, _NUM_TESTED = 3000, 1000


def signals() -> Task:
    """Returns the task to classify ten curves: 3,000 to train on, 1,000 to test on, with a fixed learning rate."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(_NUM_TRAINED + _NUM_TESTED) % _NUM_CLASSES
    inputs = _draw(labels, _templates(generator), generator)
    return Task.classification(
        name="signals",
        build_module=_network,
        train_set=TensorDataset(inputs[:_NUM_TRAINED], labels[:_NUM_TRAINED]),
        test_set=TensorDataset(inputs[_NUM_TRAINED:], labels[_NUM_TRAINED:]),
        labels=labels[:_NUM_TRAINED],
        batch_size=16,
        epochs=24,
        target=90.0,
        optimizer=lambda module: Adam(module.parameters(), lr=1e-3),
        scheduler=lambda optimizer, steps: ConstantLR(optimizer, factor=1.0),
    )


def _templates(generator: torch.Generator) -> Tensor:
    """Returns a curve for each class through equidistant knots, which starts and ends at 0."""
    knots = torch.rand(_NUM_CLASSES, _NUM_KNOTS, generator=generator) * 2 - 1
    knots[:, 0] = knots[:, -1] = 0
    return knots


def _draw(labels: Tensor, templates: Tensor, generator: torch.Generator) -> Tensor:
    """Returns a signal of shape (1, length) for each label: its curve, moved, scaled, tilted, with noise."""

    def draw(*shape: int) -> Tensor:
        return torch.rand(len(labels), *shape, generator=generator)

    def draw_normal(*shape: int) -> Tensor:
        return torch.randn(len(labels), *shape, generator=generator)

    position = torch.linspace(0, 1, _LENGTH)
    width = 0.3 + 0.2 * draw(1)
    inside = (position - draw(1) * (1 - width)) / width  # from 0 to 1 where the curve is
    knot = inside.clamp(0, 1) * (_NUM_KNOTS - 1)
    left = knot.long().clamp(max=_NUM_KNOTS - 2)
    curves, fraction = templates[labels], knot - left
    values = curves.gather(1, left) * (1 - fraction) + curves.gather(1, left + 1) * fraction
    scaled = values * (1 + 0.4 * (2 * draw(1) - 1))
    tilted = scaled + 0.5 * draw_normal(1) * (position - 0.5)
    drift = nn.functional.avg_pool1d(draw_normal(1, _LENGTH + 4), kernel_size=5, stride=1).squeeze(1)
    noisy = tilted + 0.2 * drift + 0.05 * draw_normal(_LENGTH)
    return ((noisy - noisy.mean()) / noisy.std()).unsqueeze(1)


def _network() -> nn.Module:
    """Three convolutions and two dense layers, 61,000 values."""
    return nn.Sequential(
        nn.Conv1d(1, 32, kernel_size=5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv1d(32, 64, kernel_size=3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv1d(64, 64, kernel_size=3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 5, 128),
        nn.ReLU(),
        nn.Linear(128, _NUM_CLASSES),
    )
