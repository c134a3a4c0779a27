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
from tests.harness import launch, raised
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
    "CoCoD-SGD": ("sgd", {"period": 4, "overlap_steps": 4}, {"period": 4, "overlap_steps": 4, "own_share": "progress"}),
    "streaming, with the progress since": (
        "adamw",
        {"period": 4, "fragments": 2, "overlap_steps": 3, "outer_optimizer": "nesterov"},
        {
            "period": 4,
            "fragments": [FIRST, SECOND],
            "overlap_steps": 3,
            "own_share": "progress",
            "make_outer": partial(SGD, lr=0.7, momentum=0.9, nesterov=True),
        },
    ),
    "fragments": ("sgd", {"period": 4, "fragments": 2}, {"period": 4, "fragments": [FIRST, SECOND]}),
    "EASGD": ("sgd", {"period": 2, "outer_optimizer": "elastic"}, {"period": 2, "elastic": 0.9}),
    "EASGD, overlapped": (
        "sgd",
        {"period": 4, "overlap_steps": 3, "outer_optimizer": "elastic"},
        {"period": 4, "overlap_steps": 3, "elastic": 0.9},
    ),
    "EASGD, a given force": (
        "adamw",
        {"period": 2, "outer_optimizer": "elastic", "elastic_force": 0.2},
        {"period": 2, "elastic_force": 0.2},
    ),
}


def train(optimizer_name: str, settings: dict[str, Any], interrupted: bool = True) -> dict[str, Any]:
    """Trains STEPS steps; if interrupted, a new model, optimizer and method go on in the middle of a round."""
    rank = dist.get_rank()
    settings = {"bucket_mb": 1e-4, "lr_scale": 1.0, **settings}

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


def drift_apart() -> list[tuple[str, str] | None]:
    """Rank 1 takes a step more than the others before a validation; then it validates while they train."""
    outcomes = []
    for evaluates in (False, True):
        model = seeded_mlp()
        optimizer = OPTIMIZERS["sgd"](model)
        sync = LocalSGD(model, optimizer, period=4, timeout_s=10)

        def step(i: int, model: nn.Module = model, sync: LocalSGD = sync) -> None:
            model.zero_grad()
            loss(model, i, dist.get_rank()).backward()
            sync.step()

        def diverge(evaluates: bool = evaluates, step: Any = step, sync: LocalSGD = sync) -> None:
            for i in range(3 if evaluates else 2):
                step(i)
            if dist.get_rank() == 1 and not evaluates:
                step(3)
            if dist.get_rank() == 1 or not evaluates:
                sync.flush()
            step(4)

        outcomes.append(raised(diverge))
        sync.detach(timeout_s=1.0)
        dist.barrier()
    return outcomes


def test_ranks_that_differ_are_named() -> None:
    for steps, evaluation in launch(drift_apart, 3):
        for outcome in (steps, evaluation):
            assert outcome is not None
            assert outcome[0] == "RuntimeError"
            assert "ank 1" in outcome[1]


def optimizer_states_after(average: bool) -> list[Tensor]:
    model = seeded_mlp()
    optimizer = OPTIMIZERS["adamw"](model)
    sync = LocalSGD(model, optimizer, period=2, average_optimizer_states=average)
    for i in range(4):
        model.zero_grad()
        loss(model, i, dist.get_rank()).backward()
        sync.step()
    sync.detach()
    return [optimizer.state[p]["exp_avg"] for p in model.parameters()]


def test_optimizer_states_are_averaged_if_asked_for() -> None:
    for average in (False, True):
        first, second = launch(optimizer_states_after, 2, average)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)) == average


def traffic_of(settings: dict[str, Any]) -> float:
    model = nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sync = LocalSGD(model, optimizer, **settings)
    sent = sync.metrics()["mib_sent"]
    for _ in range(12):
        model.zero_grad()
        model(torch.ones(2, 100)).sum().backward()
        sync.step()
    sent = sync.metrics()["mib_sent"] - sent
    sync.detach()
    return sent


@pytest.mark.parametrize(
    ("settings", "exchanges"),
    [
        ({"period": 4}, 3),
        ({"period": 12, "fragments": 4}, 1),
        ({"period": 100}, 0),
        ({"period": 4, "compression": "int8"}, 0.75),
    ],
)
def test_nothing_is_sent_between_averages(settings: dict[str, Any], exchanges: float) -> None:
    size = 4 * 100 * 100 * 4 / 2**20
    for sent in launch(traffic_of, 2, settings):
        assert sent == pytest.approx(exchanges * size, rel=0.02, abs=1e-4)


WRONG: list[tuple[dict[str, Any], list[str]]] = [
    ({"period": 0}, ["period", "0"]),
    ({"period": 2.5}, ["period", "2.5"]),
    ({"period": "often"}, ["period", "'often'", "'0.25 epoch'", "'selsync'"]),
    ({"period": "selsync", "smoothing": 2.0}, ["smoothing", "2.0"]),
    ({"participation": 0.0}, ["participation", "0.0"]),
    ({"participation": 0.3}, ["participation=0.3", "2 replicas", "0.5"]),
    ({"overlap_steps": 5, "period": 4}, ["overlap_steps=5", "period=4"]),
    ({"fragments": 3}, ["fragments=3", "2 layers"]),
    ({"outer_optimizer": "nesterov", "outer_lr": 0.0}, ["outer_lr", "0.0"]),
    ({"outer_optimizer": "nesterov", "outer_lr": -1.0}, ["outer_lr", "-1.0"]),
    ({"outer_optimizer": "lamb"}, ["outer_optimizer", "'lamb'", "nesterov"]),
    ({"outer_optimizer": "elastic", "participation": 0.5}, ["elastic", "participation"]),
    ({"elastic_force": 1.5}, ["elastic_force", "1.5"]),
    ({"outer_optimizer": "elastic", "elastic_force": 0.6}, ["elastic_force=0.6", "2 replicas", "0.5"]),
    ({"participation": 0.5, "compression": "int8"}, ["participation=0.5", "int8"]),
    ({"own_share": 2.0}, ["own_share", "2.0"]),
    ({"own_share": "half"}, ["own_share", "'half'", "'progress'"]),
    ({"lr_scale": 0.0}, ["lr_scale", "0.0"]),
    ({"lr_scale": "large"}, ["lr_scale", "'large'"]),
]


def attach_with_each() -> list[tuple[str, str] | None]:
    model = seeded_mlp()
    optimizer = OPTIMIZERS["sgd"](model)
    return [raised(lambda: LocalSGD(model, optimizer, **settings)) for settings, _ in WRONG]  # noqa: B023 - called at once


def test_bad_input_is_named_on_every_rank() -> None:
    for outcomes in launch(attach_with_each, 2):
        for (settings, words), outcome in zip(WRONG, outcomes, strict=True):
            assert outcome is not None, settings
            assert outcome[0] == "ValueError"
            assert all(word in outcome[1] for word in words), outcome[1]
