"""Weights that are loaded in a training of replicas: what they are compared with from then on are they themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipesync import LocalSGD, SelSync
from tests.harness import launch, raised
from tests.models import OPTIMIZERS, loss, seeded_mlp, state

METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SelSync": (SelSync, {"delta": 0.0, "outer_momentum": 0.5}),
    "SelSync, compressed": (SelSync, {"delta": 0.0, "compression": "int8"}),
    "local SGD": (LocalSGD, {"period": 2, "outer_optimizer": "nesterov"}),
    "streaming": (LocalSGD, {"period": 3, "outer_optimizer": "nesterov", "overlap_steps": 2}),
}


def load(name: str, after_attaching: bool) -> dict[str, Tensor]:
    """Trains from the weights of another model, which are loaded before the method is attached, or afterwards."""
    method, settings = METHODS[name]
    model = seeded_mlp(seed=3 if after_attaching else 7)
    optimizer = OPTIMIZERS["sgd"](model)
    sync = method(model, optimizer, **settings)
    if after_attaching:
        model.load_state_dict(state(seeded_mlp(seed=7)))
    for i in range(7):
        optimizer.zero_grad()
        loss(model, i, dist.get_rank()).backward()
        sync.step()
    sync.flush()
    sync.detach()
    return state(model)


def load_in_both_ways(name: str) -> list[dict[str, Tensor]]:
    return [load(name, after_attaching) for after_attaching in (False, True)]


@pytest.mark.parametrize("name", METHODS)
def test_training_goes_on_from_loaded_weights(name: str) -> None:
    """Bit for bit as if they had been there when the method was attached."""
    for before, after in launch(load_in_both_ways, 3, name):
        for key, value in before.items():
            assert torch.equal(after[key], value), key


def load_on_one_rank(name: str) -> tuple[str, str] | None:
    method, settings = METHODS[name]
    model = seeded_mlp()
    optimizer = OPTIMIZERS["sgd"](model)
    sync = method(model, optimizer, **settings, timeout_s=10)

    def train() -> None:
        for i in range(4):
            optimizer.zero_grad()
            loss(model, i, dist.get_rank()).backward()
            if i == 1 and dist.get_rank() == 1:
                model.load_state_dict(state(seeded_mlp(seed=7)))
                optimizer.zero_grad()
                loss(model, i, dist.get_rank()).backward()
            sync.step()

    outcome = raised(train)
    sync.detach(timeout_s=1.0)
    return outcome


@pytest.mark.parametrize("name", ["SelSync", "local SGD"])
def test_weights_loaded_on_one_rank_alone_are_refused(name: str) -> None:
    for outcome in launch(load_on_one_rank, 2, name):
        assert outcome is not None
        assert outcome[0] == "RuntimeError"
        assert "Rank 1 has loaded weights" in outcome[1]
