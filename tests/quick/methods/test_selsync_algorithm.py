"""SelSync without communication: the change of Eq. 2, flags and decisions, the threshold, and the outer step."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import SGD

from lightning_pipesync.core.comm.handle import Handle
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.methods.replicas.gradient_change import (
    FIRST_DELTA,
    GAIN,
    SMALLEST_DELTA,
    SyncDecision,
    Threshold,
)
from lightning_pipesync.methods.replicas.trigger import GradientTrigger
from lightning_pipesync.methods.selsync import GradientChangeTracker, SelSyncConfig
from tests.references.selsync import Decisions, relative_change

# --- the relative gradient change -------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.02, 0.16, 1.0])
@pytest.mark.parametrize("window", [1, 2, 25])
def test_the_change_is_that_of_the_formula(window: int, smoothing: float) -> None:
    draw = random.Random(0)
    values = [draw.lognormvariate(0, 1) for _ in range(60)]
    tracker = GradientChangeTracker(window, smoothing)
    for i, value in enumerate(values, start=1):
        assert tracker.update(value) == pytest.approx(relative_change(values[:i], window, smoothing))


def test_the_change_by_hand() -> None:
    """Window 2, smoothing 0.5: weights 1 and 1/2. Averages 6, (3 + 6/2) / 1.5 = 4, (9 + 3/2) / 1.5 = 7."""
    tracker = GradientChangeTracker(window=2, smoothing=0.5)
    assert [tracker.update(value) for value in (6.0, 3.0, 9.0)] == pytest.approx([math.inf, 2 / 6, 3 / 4])
    zero = GradientChangeTracker(1, 1.0)
    assert [zero.update(value) for value in (0.0, 0.0, 1.0)] == [math.inf, 0.0, math.inf]


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_calls_for_a_synchronized_step_and_is_ignored(value: float) -> None:
    tracker, undisturbed = GradientChangeTracker(25, 0.16), GradientChangeTracker(25, 0.16)
    for tracked in (tracker, undisturbed):
        tracked.update(1.0)
        tracked.update(1.1)
    assert tracker.update(value) == math.inf
    assert tracker.update(1.2) == undisturbed.update(1.2)


# --- decisions --------------------------------------------------------------------------------------------------------


class Rank(GradientTrigger):
    """A rank whose gradient has one value, and that sends its flag to those that share ``flags``, by rank."""

    def __init__(self, flags: dict[int, int], rank: int, **settings: Any) -> None:
        def exchange_flags(flag: int) -> Handle[list[int]]:
            flags[rank] = flag
            return Handle(lambda: list(flags.values()))

        self.parameter = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        transport: Any = SimpleNamespace(
            device=SimpleNamespace(type="cpu"), rank=rank, exchange_flags=exchange_flags, sum_over_shards=float
        )
        parameters = [NamedParameter("weight", self.parameter, "", (0, 0))]
        config = SelSyncConfig(window=3, smoothing=0.3, **settings)
        self.optimizer = SGD([self.parameter], lr=0.1)
        super().__init__(self.optimizer, parameters, config, transport)

    def measure(self, squared_norm: float | None) -> None:
        """Has a gradient of this norm, None: no gradient, and sends the flag."""
        self.parameter.grad = None if squared_norm is None else torch.full_like(self.parameter, squared_norm**0.5)
        self.complete_gradient()


def make_ranks(number: int, **settings: Any) -> list[Rank]:
    flags: dict[int, int] = {}
    return [Rank(flags, rank, **settings) for rank in range(number)]


def step(ranks: list[Rank], squared_norms: Sequence[float | None]) -> list[SyncDecision]:
    for rank, norm in zip(ranks, squared_norms, strict=True):
        rank.measure(norm)
    for rank in ranks:
        rank.end_step(1)
    return [rank.last for rank in ranks]


@pytest.mark.parametrize("delta", [0.0, 0.2, 0.5, math.inf, "auto"])
def test_decisions_of_three_ranks_are_those_of_the_paper(delta: float | str) -> None:
    """Lines 8 and 11 to 15; a skipped step was never measured."""
    draw = random.Random(0)
    ranks, paper = make_ranks(3, delta=delta), Decisions(3, delta, window=3, smoothing=0.3)
    outcomes = []
    for i in range(60):
        norms = [draw.lognormvariate(0, 0.5) for _ in ranks]
        if i % 3 == 1:
            for rank, norm in zip(ranks, norms, strict=True):
                rank._transport.device.type = "cpu" if i % 2 else "cuda"  # there the flag is sent as it is skipped
                rank.measure(norm)
                rank._transport.device.type = "cpu"
            for rank in ranks:
                rank.decide() if i % 2 else rank._exchange(skipping=True)
            for rank in ranks:
                rank.skip_step()
            paper.decide(norms)
            paper.skip()
            continue
        threshold, expected = paper.delta, paper.decide(norms)
        for decision, change in zip(step(ranks, norms), paper.changes, strict=True):
            assert decision.relative_change == pytest.approx(change)
            assert decision.delta == pytest.approx(threshold)
            assert decision.synchronized == expected
        outcomes.append(expected)
    if delta in (0.2, 0.5, "auto"):
        assert 1 < sum(outcomes) < 40, "the test must see both kinds of step"
    else:
        assert all(outcomes) == (delta == 0)


def test_one_rank_decides_for_all() -> None:
    """What any rank's flag says is in the decision of all; an undefined change does not update delta."""
    ranks = make_ranks(2, delta="auto")
    step(ranks, [1.0, 1.0])
    delta = ranks[0].threshold.delta
    for norms, missing in (([1.0, math.nan], False), ([1.0, None], True)):
        for decision in step(ranks, norms):
            assert (decision.synchronized, decision.missing_gradient) == (True, missing)
            assert (decision.not_finite, decision.undefined) == (not missing, not missing)
        assert {rank.threshold.delta for rank in ranks} == {delta} or missing
    assert not any(decision.not_finite for decision in step(ranks, [1.0, 1.0]))


# --- the threshold ----------------------------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[random.Random, int], float]] = {
    "small": lambda draw, i: 1e-5 * draw.lognormvariate(0, 1),
    "large": lambda draw, i: 1e5 * draw.lognormvariate(0, 1),
    "largest of 16": lambda draw, i: max(draw.lognormvariate(0, 2) for _ in range(16)),
    "shrinking": lambda draw, i: math.exp(-i / 200) * draw.lognormvariate(0, 1),
}


@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("lssr", [0.5, 0.8, 0.95])
def test_auto_finds_the_share_whatever_the_changes(changes: str, lssr: float) -> None:
    """Of the first thousand steps and of the second; the docstring's equation holds for all of them."""
    draw = random.Random(0)
    followed = Threshold(SelSyncConfig(lssr=lssr))
    first_delta, local = followed.delta, []
    for i in range(2000):
        synchronized = CHANGES[changes](draw, i) >= followed.delta
        followed.update(synchronized)
        local.append(not synchronized)
    assert changes == "small" or not any(local[:5]), "it begins low, and the first steps are synchronized"
    for part in (local[:1000], local[1000:]):
        assert sum(part) / 1000 == pytest.approx(lssr, abs=0.05)
    moved = math.log(followed.delta / first_delta)
    assert sum(local) / 2000 == pytest.approx(lssr - moved / (GAIN * 2000))


def test_where_auto_begins_and_ends() -> None:
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


# --- the outer step ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, None), ({"outer_lr": 0.7}, (0.7, 0.0)), ({"aggregation": "gradients"}, None)],
)
def test_the_outer_step(settings: dict[str, Any], expected: tuple[float, float] | None) -> None:
    make = SelSyncConfig(**settings).outer_step(SGD([torch.zeros(1)], lr=0.1), 2)
    group = None if make is None else make([torch.zeros(1)]).param_groups[0]
    assert (group and (group["lr"], group["momentum"])) == expected


@pytest.mark.parametrize(("follow_lr", "local"), [(True, 0.9), (False, 0.6)])
def test_fewer_steps_are_synchronized_as_the_rate_falls(follow_lr: bool, local: float) -> None:
    """Of 500 steps at a quarter of the largest rate; also by a rank that resumes there."""
    draw, shares = random.Random(0), []
    [rank] = make_ranks(1, lssr=0.6, follow_lr=follow_lr)
    for rate in (0.1, 0.025):
        [resumed] = make_ranks(1, lssr=0.6, follow_lr=follow_lr)
        resumed.load_state_dict(rank.state_dict())
        rank, resumed.optimizer.param_groups[0]["lr"] = resumed, rate
        local_steps = [not step([rank], [draw.lognormvariate(0, 0.5)])[0].synchronized for _ in range(500)]
        shares.append(sum(local_steps) / 500)
    assert shares == [pytest.approx(0.6, abs=0.05), pytest.approx(local, abs=0.05)]
