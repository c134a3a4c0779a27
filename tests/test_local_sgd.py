"""Local SGD on real processes against the simulation, bit for bit, resumed in the middle of a round."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adam

from lightning_pipesync import LocalSGD
from tests.harness import launch
from tests.models import OPTIMIZERS, loss, seeded_mlp, state
from tests.reference_local_sgd import simulate

STEPS = 13
FIRST, SECOND = ["0.weight", "0.bias"], ["1.weight", "1.bias", "3.weight", "3.bias"]  # of about the same size

#: By name: optimizer, settings, and what the simulation is given.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "FedAvg": ("sgd", {"period": 3}, {"period": 3}),
    "FedAvg, a share": ("adamw", {"period": 2, "participation": 0.67}, {"period": 2, "participants": True}),
    "post-local": ("sgd", {"period": 3, "warmup_steps": 4}, {"period": 3, "warmup_steps": 4}),
    "SlowMo": (
        "sgd",
        {"period": 4, "outer_optimizer": "sgd", "outer_lr": 0.9, "outer_momentum": 0.4},
        {"period": 4, "make_outer": partial(SGD, lr=0.9, momentum=0.4)},
    ),
    "DiLoCo": (
        "adamw",
        {"period": 3, "outer_optimizer": "nesterov"},
        {"period": 3, "make_outer": partial(SGD, lr=0.7, momentum=0.9, nesterov=True)},
    ),
    "DiLoCo after a warm-up": (
        "adamw",
        {"period": 3, "outer_optimizer": "nesterov", "warmup_steps": 2},
        {"period": 3, "make_outer": partial(SGD, lr=0.7, momentum=0.9, nesterov=True), "warmup_steps": 2},
    ),
    "outer Adam": (
        "sgd",
        {"period": 3, "outer_optimizer": "adam", "outer_lr": 0.01},
        {"period": 3, "make_outer": partial(Adam, lr=0.01)},
    ),
    "streaming": (
        "sgd",
        {"period": 4, "fragments": 2, "overlap_steps": 3, "own_share": 0.3, "outer_optimizer": "nesterov"},
        {
            "period": 4,
            "fragments": [FIRST, SECOND],
            "overlap_steps": 3,
            "own_share": 0.3,
            "make_outer": partial(SGD, lr=0.7, momentum=0.9, nesterov=True),
        },
    ),
    "streaming averages": (
        "sgd",
        {"period": 3, "fragments": 2, "overlap_steps": 3, "own_share": 0.5},
        {"period": 3, "fragments": [FIRST, SECOND], "overlap_steps": 3, "own_share": 0.5},
    ),
    "fragments": ("sgd", {"period": 4, "fragments": 2}, {"period": 4, "fragments": [FIRST, SECOND]}),
    "EASGD": ("sgd", {"period": 2, "outer_optimizer": "elastic"}, {"period": 2, "elastic": 0.9}),
    "EASGD, a given force": (
        "adamw",
        {"period": 2, "outer_optimizer": "elastic", "elastic_force": 0.2},
        {"period": 2, "elastic_force": 0.2},
    ),
}


def train(optimizer_name: str, settings: dict[str, Any], interrupted: bool = True) -> dict[str, Any]:
    """Trains STEPS steps; if interrupted, a new model, optimizer and method go on in the middle of a round."""
    rank = dist.get_rank()
    settings = {"bucket_mb": 1e-4, **settings}

    def begin(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, LocalSGD]:
        model = seeded_mlp(seed, batch_norm=True)
        optimizer = OPTIMIZERS[optimizer_name](model)
        return model, optimizer, LocalSGD(model, optimizer, **settings)

    model, optimizer, sync = begin(0)
    for i in range(STEPS):
        if interrupted and i == STEPS // 2 + 1:
            sync.flush()
            weights, saved = state(model), copy.deepcopy(sync.state_dict())
            sync.detach()
            model, optimizer, sync = begin(1)
            model.load_state_dict(weights)
            sync.load_state_dict(saved)
        optimizer.zero_grad()
        loss(model, i, rank).backward()
        sync.step()
        if i == 4:  # weights for an evaluation, and back
            sync.flush()
            sync.resume()
    own = state(model)
    sync.flush()
    outcome = {"own": own, "consolidated": state(model), "sent": sync.metrics()["mib_sent"]}
    sync.detach()
    return outcome


def train_all(cases: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    return [train(*case) for case in cases]


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor], what: object) -> None:
    for name, value in expected.items():
        assert torch.equal(actual[name], value), f"{what}, {name}: off by {(actual[name] - value).abs().max()}"


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_follows_the_papers(world_size: int) -> None:
    """Bit for bit, of each paper's algorithm; resumed in the middle of a round."""
    names = [name for name in CASES if world_size > 2 or "share" not in name]
    outcomes = launch(train_all, world_size, [CASES[name][:2] for name in names], timeout_s=240)
    for index, name in enumerate(names):
        optimizer, _, given = CASES[name]
        reference = dict(given)
        if reference.get("participants"):
            reference["participants"] = int(0.67 * world_size)
        if "elastic" in reference:
            reference["elastic_force"] = reference.pop("elastic") / world_size
        if "elastic_force" in reference:
            reference["make_outer"] = partial(SGD, lr=world_size * reference["elastic_force"])
        model, make_optimizer = seeded_mlp(batch_norm=True), OPTIMIZERS[optimizer]
        replicas, agreed = simulate(model, make_optimizer, loss, world_size=world_size, num_steps=STEPS, **reference)
        for rank, outcome in enumerate(outcome[index] for outcome in outcomes):
            assert_equal(outcome["own"], state(replicas[rank]), (name, rank))
            if "elastic_force" in reference:
                center = {key: p.detach() for key, p in agreed.named_parameters()}
                assert_equal(outcome["consolidated"], center, (name, rank))
