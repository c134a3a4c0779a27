"""The outer step: alone, against the simulation on real processes, resumed, and with a codec."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from lightning_pipesync.methods.replicas.global_weights import OuterStep
from lightning_pipesync.methods.selsync import SelSync, SelSyncConfig
from tests.references.selsync import mean, simulate
from tests.support.harness import assert_raised, on_ranks, raised
from tests.support.models import OPTIMIZERS, Run, assert_same, loss, seeded_mlp, state

RANKS, STEPS = 4, 16
BASE: dict[str, Any] = {"delta": 0.2, "smoothing": 0.3}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {"outer_lr": 0.7, "outer_momentum": 0.5}),
    ("adamw", {"outer_lr": 1.0, "outer_momentum": 0.3}),
    ("sgd", {"outer_lr": 1.3, "outer_momentum": 0.0}),
]


@pytest.mark.parametrize(("lr", "momentum"), [(1.0, 0.0), (0.7, 0.9), (1.3, 0.3)])
def test_its_arithmetic_is_that_of_sgd_with_nesterov_momentum(lr: float, momentum: float) -> None:
    torch.manual_seed(0)
    global_weights = [torch.randn(1000), torch.randn(30)]
    expected = [weights.clone().requires_grad_() for weights in global_weights]
    make = partial(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=momentum > 0)
    optimizer, outer = make(expected), OuterStep(global_weights, make)
    for _ in range(5):
        movements = [torch.randn_like(weights) for weights in global_weights]
        for index, (weights, movement) in enumerate(zip(expected, movements, strict=True)):
            weights.grad = -movement
            assert outer.step(index, movement) is global_weights[index]
        optimizer.step()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(global_weights, expected, strict=True))


def test_a_state_of_an_earlier_version_is_refused() -> None:
    outer = OuterStep([torch.zeros(3)], partial(torch.optim.SGD, lr=1.0, momentum=0.3, nesterov=True))
    with pytest.raises(ValueError, match="of an earlier version: remove the key 'pipesync'"):
        outer.load_state_dict({"velocities": [torch.zeros(3)]})


def train(optimizer_name: str, settings: dict[str, Any], interrupted: bool = True) -> dict[str, Any]:
    """Trains STEPS steps; if interrupted, it goes on in the middle with a new model, optimizer and method."""
    run = Run(SelSync, optimizer_name, seeded_mlp(batch_norm=True), bucket_mb=1e-4, **BASE, **settings)
    synchronized, after, averages = [], [], []
    for i in range(STEPS):
        if interrupted and i == STEPS // 2:
            run = run.resumed(seeded_mlp(1, batch_norm=True))
        run.step(i)
        synchronized.append(run.sync.last.synchronized)
        after.append(state(run.model))
        run.sync.flush()
        averages.append(state(run.model))
        run.sync.resume()
    run.sync.detach()
    return {"synchronized": synchronized, "after": after, "averages": averages}


@pytest.mark.parametrize(("optimizer", "outer"), CASES)
def test_follows_diloco_at_the_steps_that_selsync_chooses(optimizer: str, outer: dict[str, Any]) -> None:
    """Bit for bit, resumed in the middle. The consolidated weights are the average, which then are the outer ones."""
    outcomes = on_ranks(train, RANKS, optimizer, outer)
    given = {"world_size": RANKS, "num_steps": STEPS, **BASE, **outer}
    replicas, synchronized, _ = simulate(seeded_mlp(batch_norm=True), OPTIMIZERS[optimizer], loss, **given)
    assert 3 < sum(synchronized) < STEPS - 3, "the test must see both kinds of step"
    for rank, outcome in enumerate(outcomes):
        assert outcome["synchronized"] == synchronized
        assert_same(outcome["after"][-1], state(replicas[rank]), rank)
    for i, was_synchronized in enumerate(synchronized):
        for name in ("0.weight", "1.running_mean"):
            average = mean([outcome["after"][i][name] for outcome in outcomes])
            for outcome in outcomes:
                assert torch.equal(outcome["averages"][i][name], average)
                assert not was_synchronized or torch.equal(outcome["after"][i][name], average)


@pytest.mark.parametrize("codec", ["int8", "topk"])
def test_with_a_codec_all_ranks_agree(codec: str) -> None:
    """Bit for bit at each synchronized step; a resumed run is the uninterrupted one."""
    resumed, whole = (
        on_ranks(train, 2, "sgd", {"compression": codec, "outer_momentum": 0.3}, interrupted)
        for interrupted in (True, False)
    )
    for mine, theirs in (resumed, whole):
        for i, synchronized in enumerate(mine["synchronized"]):
            if synchronized:
                assert_same(mine["after"][i], theirs["after"][i], i)
    assert_same(resumed[0]["after"][-1], whole[0]["after"][-1])


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


def resume_with_another_delta(before: Any, after: Any) -> tuple[str, str] | None:
    saved = Run(SelSync, "adamw", delta=before)
    resumed = SelSync(saved.model, saved.optimizer, delta=after)
    state_of_rank = saved.sync.state_dict()
    refused = raised(lambda: resumed.load_state_dict(state_of_rank))
    saved.sync.detach()
    resumed.detach()
    return refused


@pytest.mark.parametrize(("before", "after"), [(0.3, "auto"), ("auto", 0.3)])
def test_a_state_of_another_default_is_refused(before: Any, after: Any) -> None:
    """Only one of them has an outer momentum."""
    for refused in on_ranks(resume_with_another_delta, 2, before, after):
        assert_raised(refused, "ValueError", "'outer_momentum': [0.3]", "'outer_momentum': [0.0]")
