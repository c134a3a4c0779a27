"""The outer step: alone, against the simulation on real processes, resumed, and with a codec."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipesync.methods.replicas.agreed import OuterStep
from lightning_pipesync.methods.selsync import SelSync, SelSyncConfig
from tests.harness import launch, raised
from tests.models import OPTIMIZERS, loss, seeded_mlp, state
from tests.reference_selsync import mean, simulate

RANKS, STEPS = 4, 16
BASE: dict[str, Any] = {"delta": 0.2, "smoothing": 0.3, "bucket_mb": 1e-4}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {"outer_lr": 0.7, "outer_momentum": 0.5}),
    ("adamw", {"outer_lr": 1.0, "outer_momentum": 0.3}),
    ("sgd", {"outer_lr": 1.3, "outer_momentum": 0.0}),
]


@pytest.mark.parametrize(("lr", "momentum"), [(1.0, 0.0), (0.7, 0.9), (1.3, 0.3)])
def test_its_arithmetic_is_that_of_sgd_with_nesterov_momentum(lr: float, momentum: float) -> None:
    torch.manual_seed(0)
    agreed = [torch.randn(1000), torch.randn(30)]
    expected = [weights.clone().requires_grad_() for weights in agreed]
    make = partial(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=momentum > 0)
    optimizer, outer = make(expected), OuterStep(agreed, make)
    for _ in range(5):
        movements = [torch.randn_like(weights) for weights in agreed]
        for index, (weights, movement) in enumerate(zip(expected, movements, strict=True)):
            weights.grad = -movement
            assert outer.step(index, movement) is agreed[index]
        optimizer.step()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(agreed, expected, strict=True))


def test_a_state_of_an_earlier_version_is_refused() -> None:
    outer = OuterStep([torch.zeros(3)], partial(torch.optim.SGD, lr=1.0, momentum=0.3, nesterov=True))
    with pytest.raises(ValueError, match="of an earlier version: remove the key 'pipesync'"):
        outer.load_state_dict({"velocities": [torch.zeros(3)]})


def train(optimizer_name: str, settings: dict[str, Any], interrupted: bool = True) -> dict[str, Any]:
    """Trains STEPS steps; if interrupted, it goes on in the middle with a new model, optimizer and method."""
    rank = dist.get_rank()
    settings = {**BASE, **settings}

    def begin(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, SelSync]:
        model = seeded_mlp(seed, batch_norm=True)
        optimizer = OPTIMIZERS[optimizer_name](model)
        return model, optimizer, SelSync(model, optimizer, **settings)

    model, optimizer, sync = begin(0)
    synchronized, after, averages = [], [], []
    for i in range(STEPS):
        if interrupted and i == STEPS // 2:
            sync.flush()
            weights, saved = state(model), copy.deepcopy(sync.state_dict())
            sync.detach()
            model, optimizer, sync = begin(1)
            model.load_state_dict(weights)
            sync.load_state_dict(saved)
        optimizer.zero_grad()
        loss(model, i, rank).backward()
        sync.step()
        synchronized.append(sync.last.synchronized)
        after.append(state(model))
        sync.flush()
        averages.append(state(model))
        sync.resume()
    sync.detach()
    return {"synchronized": synchronized, "after": after, "averages": averages}


def train_all(cases: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    return [train(*case) for case in cases]


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor], what: object) -> None:
    for name, value in expected.items():
        assert torch.equal(actual[name], value), f"{what}, {name}: off by {(actual[name] - value).abs().max()}"


def test_follows_diloco_at_the_steps_that_selsync_chooses() -> None:
    """Bit for bit, resumed in the middle. The consolidated weights are the average, which then are the outer ones."""
    outcomes = launch(train_all, RANKS, CASES)
    for index, (optimizer, outer) in enumerate(CASES):
        replicas, synchronized, _ = simulate(
            seeded_mlp(batch_norm=True),
            OPTIMIZERS[optimizer],
            loss,
            world_size=RANKS,
            num_steps=STEPS,
            delta=BASE["delta"],
            smoothing=BASE["smoothing"],
            **outer,
        )
        assert 3 < sum(synchronized) < STEPS - 3, "the test must see both kinds of step"
        of_ranks = [outcome[index] for outcome in outcomes]
        for rank, outcome in enumerate(of_ranks):
            assert outcome["synchronized"] == synchronized
            assert_equal(outcome["after"][-1], state(replicas[rank]), (outer, rank))
        for i, was_synchronized in enumerate(synchronized):
            for name in ("0.weight", "1.running_mean"):
                average = mean([outcome["after"][i][name] for outcome in of_ranks])
                for outcome in of_ranks:
                    assert torch.equal(outcome["averages"][i][name], average)
                    assert not was_synchronized or torch.equal(outcome["after"][i][name], average)


COMPRESSED = [
    ("sgd", {"compression": codec, "outer_momentum": 0.3}, interrupted)
    for codec in ("int8", "topk")
    for interrupted in (True, False)
]


def test_with_a_codec_all_ranks_agree() -> None:
    """Bit for bit at each synchronized step; a resumed run is the uninterrupted one."""
    outcomes = launch(train_all, 2, COMPRESSED)
    for (_, settings, interrupted), mine, theirs in zip(COMPRESSED, *outcomes, strict=True):
        for i, synchronized in enumerate(mine["synchronized"]):
            if synchronized:
                assert_equal(mine["after"][i], theirs["after"][i], (settings, i))
        if interrupted:
            [whole] = [outcomes[0][j] for j, case in enumerate(COMPRESSED) if case == ("sgd", settings, False)]
            assert_equal(mine["after"][-1], whole["after"][-1], settings)


@pytest.mark.parametrize(
    ("optimizer", "settings", "expected"),
    [
        ("adamw", {}, (1.0, 0.3)),
        ("sgd", {}, None),
        ("adamw", {"delta": 0.3}, None),
        ("adamw", {"lssr": 0}, None),
        ("adamw", {"outer_momentum": 0}, None),
        ("adamw", {"aggregation": "gradients"}, None),
        ("sgd", {"outer_lr": 0.7}, (0.7, 0.0)),
    ],
)
def test_its_default(optimizer: str, settings: dict[str, Any], expected: tuple[float, float] | None) -> None:
    """An outer momentum for Adam, unless delta is given, as in the paper."""
    make = SelSyncConfig(**settings).outer_step(OPTIMIZERS[optimizer](seeded_mlp()), 2)
    group = None if make is None else make([torch.zeros(1)]).param_groups[0]
    assert (group and (group["lr"], group["momentum"])) == expected


def resume_with_another_delta() -> list[tuple[str, str] | None]:
    """Saves without an outer momentum, and goes on where there is one by default; and the other way round."""
    refused = []
    for before, after in ((0.3, "auto"), ("auto", 0.3)):
        model = seeded_mlp()
        optimizer = OPTIMIZERS["adamw"](model)
        saved, resumed = (SelSync(model, optimizer, delta=delta) for delta in (before, after))
        state_of_rank = saved.state_dict()
        refused.append(raised(lambda one=resumed, state_of_rank=state_of_rank: one.load_state_dict(state_of_rank)))
        saved.detach()
        resumed.detach()
    return refused


def test_a_state_of_another_default_is_refused() -> None:
    for outcomes in launch(resume_with_another_delta, 2):
        for refused in outcomes:
            assert refused is not None
            assert refused[0] == "ValueError"
            assert "'outer_momentum': [0.3]" in refused[1]
            assert "'outer_momentum': [0.0]" in refused[1]
