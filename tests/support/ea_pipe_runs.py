"""Layers and engines for the tests of EA-Pipe; virtual stages stand in for processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from lightning_pipesync import EAPipe
from tests.support.models import assert_same, batch

#: Indices of the layers with which the stages begin, by their number; each stage has at least one Linear.
CUTS = {1: (), 2: (4,), 3: (2, 6), 4: (2, 4, 7)}
OPTIMIZERS = {
    "sgd": lambda weights: SGD(weights, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "plain sgd": lambda weights: SGD(weights, lr=0.05),
    "adam": lambda weights: Adam(weights, lr=0.01),
}
ASYNCHRONOUS = ("ea_pipe", "pipedream", "weight_stashing", "naive", "spectrain")


def layers(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 8), nn.ReLU(inplace=True),
        nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 8), nn.ReLU(inplace=True), nn.Linear(8, 3),
    )  # fmt: skip


def engine_on(
    model: nn.Module, optimizer: Any = "sgd", loss: Any = nn.functional.cross_entropy, **settings: Any
) -> EAPipe:
    """An engine of two virtual stages, if the settings do not say otherwise."""
    stages = settings.setdefault("virtual_stages", 2)
    settings.setdefault("split", CUTS.get(stages, "balanced"))
    return EAPipe(model, loss, OPTIMIZERS.get(optimizer, optimizer), **settings)


def train_on(engine: EAPipe, steps: Iterable[int]) -> None:
    """Trains each pipeline on its own batches."""
    for t in steps:
        engine.train_batch(batch(t, engine.data_part[0]))


def average_elastically(
    make: Callable[[], nn.Module],
    make_optimizer: Callable[[nn.Module], Optimizer],
    update: Callable[[nn.Module, Optimizer, int], object],
    num_updates: int,
    force: float,
) -> nn.Module:
    """Returns the master of two replicas, which are updated in turns."""
    master, *replicas = (make() for _ in range(3))
    optimizers = [make_optimizer(replica) for replica in replicas]
    for t in range(num_updates):
        update(replicas[t % 2], optimizers[t % 2], t)
        with torch.no_grad():
            for p, center in zip(replicas[t % 2].parameters(), master.parameters(), strict=True):
                difference = p - center
                p -= force * difference
                center += force * difference
    return master


def assert_equal(weights: Sequence[Tensor], reference: Sequence[Tensor]) -> None:
    for index, (tensor, other) in enumerate(zip(weights, reference, strict=True)):
        assert torch.equal(tensor, other), f"tensor {index}: off by {(tensor - other).abs().max()}"


def assert_same_weights(engine: EAPipe, other: EAPipe) -> None:
    """Flushes both, and compares their models bit for bit."""
    engine.flush()
    other.flush()
    assert_same(engine._model.state_dict(), other._model.state_dict())
