"""`delta="auto"`: alone, against the simulation on real processes, resumed, and where a step says nothing about it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_pipesync.methods.replicas import gradient_change
from lightning_pipesync.methods.replicas.gradient_change import FIRST_DELTA, GAIN, SMALLEST_DELTA, Threshold
from lightning_pipesync.methods.selsync import SelSync, SelSyncConfig
from tests.references.selsync import next_delta, simulate
from tests.support.harness import assert_raised, on_ranks, raised
from tests.support.models import OPTIMIZERS, Run, assert_same, loss, seeded_mlp, state

RANKS, STEPS = 3, 60
SETTINGS: dict[str, Any] = {"delta": "auto", "lssr": 0.7, "smoothing": 0.3, "outer_momentum": 0}

DISTRIBUTIONS: dict[str, Callable[[random.Random, int], float]] = {
    "small": lambda draw, i: 1e-5 * draw.lognormvariate(0, 1),
    "large": lambda draw, i: 1e5 * draw.lognormvariate(0, 1),
    "largest of 16": lambda draw, i: max(draw.lognormvariate(0, 2) for _ in range(16)),
    "shrinking": lambda draw, i: math.exp(-i / 200) * draw.lognormvariate(0, 1),
}


@pytest.mark.parametrize("changes", DISTRIBUTIONS)
@pytest.mark.parametrize("lssr", [0.5, 0.8, 0.95])
def test_it_finds_the_share_whatever_the_changes(changes: str, lssr: float) -> None:
    """Of the first thousand steps and of the second; the docstring's equation holds for all of them."""
    draw = random.Random(0)
    followed = Threshold(SelSyncConfig(lssr=lssr))
    first_delta, local = followed.delta, []
    for i in range(2000):
        synchronized = DISTRIBUTIONS[changes](draw, i) >= followed.delta
        followed.update(synchronized)
        local.append(not synchronized)
    assert changes == "small" or not any(local[:5]), "it begins low, and the first steps are synchronized"
    for part in (local[:1000], local[1000:]):
        assert sum(part) / 1000 == pytest.approx(lssr, abs=0.05)
    moved = math.log(followed.delta / first_delta)
    assert sum(local) / 2000 == pytest.approx(lssr - moved / (GAIN * 2000))


def test_where_it_begins_and_ends() -> None:
    assert Threshold(SelSyncConfig(smoothing=0.5)).delta == FIRST_DELTA * 0.5
    constant = Threshold(SelSyncConfig(lssr=0.9))
    for _ in range(10_000):  # a gradient that stays the same
        constant.update(constant.delta <= 0.0)
    assert constant.delta == SMALLEST_DELTA
    for delta in (Threshold(SelSyncConfig(delta="auto", lssr=0)), Threshold(SelSyncConfig(delta=0.0))):
        delta.update(True)
        assert delta.delta == 0
    given = Threshold(SelSyncConfig(delta=0.4))
    given.update(False)
    given.load_state_dict(constant.state_dict())
    assert given.delta == 0.4
    constant.load_state_dict(given.state_dict())
    assert constant.delta == SMALLEST_DELTA, "a checkpoint of a given delta does not say where auto begins"


def train_and_resume(aggregation: str, optimizer_name: str) -> dict[str, Any]:
    """Trains STEPS steps; goes on in the middle with a new model, optimizer and method."""
    run = Run(SelSync, optimizer_name, aggregation=aggregation, bucket_mb=1e-4, **SETTINGS)
    synchronized, deltas = [], []
    for i in range(STEPS):
        if i == STEPS // 2:
            shown = run.sync.metrics()["delta"]
            run = run.resumed(seeded_mlp(seed=1))
            assert run.sync.metrics()["delta"] == shown
        run.step(i)
        synchronized.append(run.sync.last.synchronized)
        deltas.append(run.sync.last.delta)
    run.sync.detach()
    following = run.sync.metrics()["delta"]
    return {"own": state(run.model), "synchronized": synchronized, "deltas": deltas, "next": following}


@pytest.mark.parametrize("aggregation", ["parameters", "gradients"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_follows_the_simulation_and_resumes(aggregation: str, optimizer: str) -> None:
    """Bit for bit: thresholds, decisions and weights."""
    deltas: list[float] = []
    replicas, synchronized, _ = simulate(
        seeded_mlp(),
        OPTIMIZERS[optimizer],
        loss,
        world_size=RANKS,
        num_steps=STEPS,
        aggregation=aggregation,
        deltas=deltas,
        **SETTINGS,
    )
    assert 5 < sum(synchronized) < STEPS - 5, "the test must see both kinds of step"
    for rank, outcome in enumerate(on_ranks(train_and_resume, RANKS, aggregation, optimizer)):
        assert outcome["synchronized"] == synchronized
        assert outcome["deltas"] == deltas
        assert outcome["next"] == next_delta(deltas[-1], SETTINGS["lssr"], synchronized[-1])
        assert_same(outcome["own"], state(replicas[rank]))


def set_by_hand(first: float) -> tuple[Any, list[float], int]:
    """What is raised where delta is set during training; deltas after resumptions; and synchronized steps then."""
    run = Run(SelSync, delta=first)
    run.steps(range(4))
    before = run.sync.state_dict()
    refused = raised(lambda: setattr(run.sync, "delta", 0.0))
    run = run.resumed(seeded_mlp(seed=1))
    deltas, synchronized = [run.sync.delta], run.sync.num_synchronized_steps
    run.steps(range(4, 8))
    synchronized = run.sync.num_synchronized_steps - synchronized
    run.sync.load_state_dict(before)
    deltas.append(run.sync.delta)
    saved = run.sync.state_dict()
    run.sync.detach()
    other = Run(SelSync, delta=5.0)
    other.sync.load_state_dict(saved)
    deltas.append(other.sync.delta)
    other.sync.detach()
    return refused, deltas, synchronized


def test_what_is_set_by_hand_is_resumed_unless_the_setting_is_another() -> None:
    for outcome in on_ranks(set_by_hand, 2, 1e9):
        assert outcome == (None, [0.0, 1e9, 5.0], 4)


def test_what_is_set_by_hand_after_no_flags_is_refused() -> None:
    for refused, deltas, _ in on_ranks(set_by_hand, 2, math.inf):
        assert_raised(refused, "ValueError", "delta=inf", "attach SelSync with a large one")
        assert deltas == [math.inf, math.inf, 5.0]


def skip_steps(way: str) -> tuple[list[float], list[bool]]:
    """Trains with some gradients measured, and their steps skipped in some way; returns the thresholds."""
    aggregation = "gradients" if way == "gradients" else "parameters"
    with mock.patch.object(gradient_change, "FIRST_DELTA", 1.0):  # so that steps of both kinds come soon
        run = Run(SelSync, aggregation=aggregation, **SETTINGS)
    deltas, synchronized = [], []
    for i in range(14):
        run.backward(i)
        if i in (0, 4, 5, 9):
            if way != "never measured":
                run.sync.clip(1.0)
            continue
        run.sync.clip(1.0)
        run.sync.step()
        deltas.append(run.sync.metrics()["delta"])
        synchronized.append(run.sync.last.synchronized)
    run.sync.detach()
    return deltas, synchronized


def test_a_skipped_step_does_not_move_it() -> None:
    never, skipped, with_gradients = (
        on_ranks(skip_steps, 2, way) for way in ("never measured", "skipped", "gradients")
    )
    assert skipped == never
    for _, synchronized in never:
        assert 1 < sum(synchronized) < len(synchronized), "the test must see both kinds of step"
    for deltas, synchronized in with_gradients:
        assert len(deltas) == len(never[0][0])
        steps = zip(deltas, deltas[1:], synchronized[1:], strict=False)
        assert all(after == next_delta(before, 0.7, was) for before, after, was in steps)


def overflow_on_one_rank() -> list[Any]:
    run = Run(SelSync, **SETTINGS)
    model, sync = run.model, run.sync
    seen = []
    for i in range(8):
        run.backward(i)
        if dist.get_rank() == 1 and i in (0, 5, 6):  # before there is anything to compare with, and later
            model[0].weight.grad[0, 0] = math.nan if i == 6 else math.inf
        sync.reduce()
        sync.step(run.optimizer.step if i not in (0, 5, 6) else lambda: None)
        seen.append((sync.last.synchronized, sync.last.undefined, sync.metrics()["delta"]))
    sync.detach()
    return seen


def test_a_change_that_is_not_defined_does_not_move_it() -> None:
    outcomes = on_ranks(overflow_on_one_rank, 2)
    assert outcomes[0] == outcomes[1]
    synchronized, undefined, deltas = zip(*outcomes[0], strict=True)
    assert all(synchronized)
    assert undefined == (True, True, False, False, False, True, True, False), "rank 1's first norm is that of step 1"
    expected = FIRST_DELTA * SETTINGS["smoothing"]
    for was_undefined, delta in zip(undefined, deltas, strict=True):
        expected = expected if was_undefined else next_delta(expected, SETTINGS["lssr"], True)
        assert delta == expected


def train_two_optimizers() -> list[list[float]]:
    """One network's gradient changes, the other's never does."""
    rank = dist.get_rank()
    changing, constant = seeded_mlp(), nn.Linear(2, 1, bias=False)
    model = nn.ModuleList([changing, constant])
    first, second = (torch.optim.SGD(part.parameters(), lr=0.01) for part in (changing, constant))
    sync = SelSync(model, [first, second], **SETTINGS)
    deltas: list[list[float]] = [[], []]
    for i in range(20):
        for j, optimizer in enumerate((first, second)):
            optimizer.zero_grad()
            (constant(torch.ones(1, 2)).sum() if j else loss(changing, i, rank)).backward()
            sync.step(optimizer=optimizer)
            deltas[j].append(sync.metrics()["delta"])
    sync.detach()
    return deltas


def test_each_optimizer_has_its_own() -> None:
    outcomes = on_ranks(train_two_optimizers, 2)
    assert outcomes[0] == outcomes[1]
    changing, constant = outcomes[0]
    assert changing[-1] > changing[0]
    assert constant[1:] == sorted(constant[1:], reverse=True)
