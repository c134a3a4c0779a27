"""DeAR on real processes against DistributedDataParallel."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_pipesync.methods.dear import DeAR
from tests.harness import launch
from tests.models import OPTIMIZERS, loss, seeded_mlp, state

STEPS = 12


def train_ddp(optimizer_name: str) -> dict[str, Tensor]:
    model = seeded_mlp()
    optimizer = OPTIMIZERS[optimizer_name](model)
    wrapped = DistributedDataParallel(model)
    for i in range(STEPS):
        optimizer.zero_grad()
        loss(wrapped, i, dist.get_rank()).backward()
        optimizer.step()
    return state(model)


def train(optimizer_name: str, settings: dict[str, Any]) -> dict[str, Tensor]:
    model = seeded_mlp(seed=dist.get_rank())  # rank 0's weights count
    optimizer = OPTIMIZERS[optimizer_name](model)
    sync = DeAR(model, optimizer, **settings)
    for i in range(STEPS):
        optimizer.zero_grad()
        loss(model, i, dist.get_rank()).backward()
        sync.step()
    sync.flush()
    assert sync.flushed
    sync.detach()
    return state(model)


def assert_same_state(actual: dict[str, Tensor], expected: dict[str, Tensor], exact: bool = True) -> None:
    for name, value in expected.items():
        if exact:
            assert torch.equal(actual[name], value), f"{name}: off by {(actual[name] - value).abs().max()}"
        else:
            torch.testing.assert_close(actual[name], value)


@pytest.mark.parametrize("update", ["sharded", "replicated"])
@pytest.mark.parametrize(
    ("optimizer", "world_size", "fusion"),
    [
        *product(["sgd", "adamw"], [2, 4], [{}]),
        *product(["sgd"], [1, 3], [{}]),
        *product(["adamw"], [2], [{"buffer_mb": 1e-4}, {"fusion": "none"}, {"fusion": "layers", "num_layers": 1}]),
    ],
)
def test_is_ddp(optimizer: str, world_size: int, fusion: dict[str, Any], update: str) -> None:
    """Bit for bit where dividing by the number of ranks is exact; DDP does it before the sum, DeAR after it."""
    expected = launch(train_ddp, world_size, optimizer)[0]
    outcomes = launch(train, world_size, optimizer, {"update": update, **fusion})
    for outcome in outcomes:
        assert_same_state(outcome, expected, exact=world_size in (1, 2))
        assert_same_state(outcome, outcomes[0])
