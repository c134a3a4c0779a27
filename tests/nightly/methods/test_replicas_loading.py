"""Weights that are loaded in a training of replicas: what they are compared with from then on are they themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from lightning_pipesync import LocalSGD, SelSync
from tests.support.harness import assert_raised, on_ranks, raised
from tests.support.models import Run, assert_same, seeded_mlp, state

METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SelSync": (SelSync, {"delta": 0.0, "outer_momentum": 0.5}),
    "SelSync, compressed": (SelSync, {"delta": 0.0, "compression": "int8"}),
    "local SGD": (LocalSGD, {"period": 2, "outer_optimizer": "nesterov"}),
    "streaming": (LocalSGD, {"period": 3, "outer_optimizer": "nesterov", "overlap_steps": 2}),
}


def load(name: str, after_attaching: bool) -> dict[str, Tensor]:
    """Trains from the weights of another model, which are loaded before the method is attached, or afterwards."""
    method, settings = METHODS[name]
    run = Run(method, "sgd", seeded_mlp(seed=3 if after_attaching else 7), **settings)
    if after_attaching:
        run.model.load_state_dict(state(seeded_mlp(seed=7)))
    run.steps(range(7))
    return run.end()


@pytest.mark.parametrize("name", METHODS)
def test_training_goes_on_from_loaded_weights(name: str) -> None:
    """Bit for bit as if they had been there when the method was attached."""
    for before, after in zip(on_ranks(load, 3, name, False), on_ranks(load, 3, name, True), strict=True):
        assert_same(after, before)


def load_on_one_rank(name: str) -> tuple[str, str] | None:
    method, settings = METHODS[name]
    run = Run(method, **settings, timeout_s=10)

    def train() -> None:
        run.step(0)
        if dist.get_rank() == 1:
            run.model.load_state_dict(state(seeded_mlp(seed=7)))
        run.steps(range(1, 4))

    outcome = raised(train)
    run.sync.detach(timeout_s=1.0)
    return outcome


@pytest.mark.parametrize("name", ["SelSync", "local SGD"])
def test_weights_loaded_on_one_rank_alone_are_refused(name: str) -> None:
    for outcome in on_ranks(load_on_one_rank, 2, name):
        assert_raised(outcome, "RuntimeError", "Rank 1 has loaded weights")
