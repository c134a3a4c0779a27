"""Algorithm 1 without communication: the relative gradient change of Eq. 2, flags, decisions and skipped steps."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from lightning_pipesync.methods.replicas.gradient_change import SelectiveSync, SyncDecision
from lightning_pipesync.methods.selsync import GradientChangeTracker, SelSyncConfig
from tests.references.selsync import next_delta, relative_change


@pytest.mark.parametrize("smoothing", [0.02, 0.16, 0.9, 1.0])
@pytest.mark.parametrize("window", [1, 2, 25])
def test_against_the_formula(window: int, smoothing: float) -> None:
    draw = random.Random(0)
    values = [draw.lognormvariate(0, 1) for _ in range(60)]
    tracker = GradientChangeTracker(window, smoothing)
    for i, value in enumerate(values, start=1):
        assert tracker.update(value) == pytest.approx(relative_change(values[:i], window, smoothing))


def test_by_hand() -> None:
    """Window 2, smoothing 0.5: weights 1 and 1/2. Averages 6, (3 + 6/2) / 1.5 = 4, (9 + 3/2) / 1.5 = 7."""
    tracker = GradientChangeTracker(window=2, smoothing=0.5)
    assert tracker.update(6.0) == math.inf
    assert tracker.update(3.0) == pytest.approx(2 / 6)
    assert tracker.update(9.0) == pytest.approx(3 / 4)


def test_a_doubled_norm_without_smoothing() -> None:
    tracker = GradientChangeTracker(window=1, smoothing=1.0)
    assert tracker.update(2.0) == math.inf
    assert tracker.update(4.0) == 1.0
    assert tracker.update(1.0) == 0.75
    assert tracker.update(1.0) == 0.0


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_calls_for_a_synchronized_step_and_is_ignored(value: float) -> None:
    tracker, undisturbed = GradientChangeTracker(25, 0.16), GradientChangeTracker(25, 0.16)
    for tracked in (tracker, undisturbed):
        tracked.update(1.0)
        tracked.update(1.1)
    assert tracker.update(value) == math.inf
    assert tracker.update(1.2) == undisturbed.update(1.2)


def test_gradients_of_zero() -> None:
    tracker = GradientChangeTracker(1, 1.0)
    tracker.update(0.0)
    assert tracker.update(0.0) == 0.0
    assert tracker.update(1.0) == math.inf


def test_state() -> None:
    tracker = GradientChangeTracker(3, 0.5)
    for value in (1.0, 2.0, 3.0, 4.0):
        tracker.update(value)
    other = GradientChangeTracker(3, 0.5)
    other.load_state_dict(tracker.state_dict())
    assert other.update(7.0) == tracker.update(7.0)
    assert other.update(1.0) == tracker.update(1.0)


def make_ranks(number: int, **settings: Any) -> list[SelectiveSync]:
    return [SelectiveSync(SelSyncConfig(window=3, smoothing=0.3, **settings), "SGD") for _ in range(number)]


def step(ranks: list[SelectiveSync], squared_norms: Sequence[float]) -> list[SyncDecision]:
    flags = [rank.measure(norm) for rank, norm in zip(ranks, squared_norms, strict=True)]
    decisions = [rank.decide(flags) for rank in ranks]
    for rank in ranks:
        rank.finish_step()
    return decisions


@pytest.mark.parametrize("delta", [0.0, 0.2, 0.5, math.inf, "auto"])
def test_decisions_of_three_ranks_against_the_paper(delta: float | str) -> None:
    """Lines 8 and 11 to 15, from all squared norms so far."""
    draw = random.Random(0)
    ranks = make_ranks(3, delta=delta)
    norms: list[list[float]] = [[], [], []]
    threshold = 0.01 * 0.3 if isinstance(delta, str) else delta
    outcomes = []
    for _ in range(40):
        for of_rank in norms:
            of_rank.append(draw.lognormvariate(0, 0.5))
        changes = [relative_change(of_rank, 3, 0.3) for of_rank in norms]
        expected = threshold < math.inf and any(change >= threshold for change in changes)
        for decision, change in zip(step(ranks, [of_rank[-1] for of_rank in norms]), changes, strict=True):
            assert decision.relative_change == pytest.approx(change)
            assert decision.delta == pytest.approx(threshold)
            assert decision.synchronized == expected
        outcomes.append(expected)
        if isinstance(delta, str) and max(changes) < math.inf:
            threshold = next_delta(threshold, 0.8, expected)
    if delta in (0.2, 0.5, "auto"):
        assert 1 < sum(outcomes) < 40, "the test must see both kinds of step"
    else:
        assert all(outcomes) == (delta == 0)


def test_one_rank_decides_for_all() -> None:
    """What any rank's flag says is in the decision of all; an undefined change does not update delta."""
    ranks = make_ranks(2, delta="auto")
    step(ranks, [1.0, 1.0])
    delta = ranks[0].threshold.delta
    flags = [ranks[0].measure(1.0), ranks[1].measure(math.nan, missing_gradient=True)]
    for rank in ranks:
        decision = rank.decide(flags)
        assert (decision.synchronized, decision.missing_gradient) == (True, True)
        assert (decision.not_finite, decision.undefined) == (True, True)
        rank.finish_step()
        assert rank.threshold.delta == delta
    assert not any(decision.not_finite for decision in step(ranks, [1.0, 1.0]))


@pytest.mark.parametrize("decided", [False, True])
def test_a_skipped_step_was_never_measured(decided: bool) -> None:
    draw = random.Random(1)
    skipping, undisturbed = make_ranks(2, delta=0.2), make_ranks(2, delta=0.2)
    for i in range(20):
        norms = [draw.lognormvariate(0, 0.5) for _ in skipping]
        if i % 3 == 1:
            flags = [rank.measure(norm, skipping=not decided) for rank, norm in zip(skipping, norms, strict=True)]
            for rank in skipping:
                if decided:
                    rank.decide(flags)
                rank.skip_step(flags)
            continue
        assert step(skipping, norms) == step(undisturbed, norms)


def test_ranks_that_skip_other_steps_find_out() -> None:
    """At the flag that a rank sends when it skips, at the next step, and before weights are consolidated."""
    first, second = make_ranks(2, delta=0.2)
    flags = [first.measure(1.0), second.measure(1.0, skipping=True)]
    with pytest.raises(RuntimeError, match="Rank 1 and rank 0 have not skipped the same steps of SGD"):
        first.decide(flags)
    first, second = make_ranks(2, delta=0.2)
    flags = [first.measure(1.0), second.measure(1.0)]
    first.decide(flags)
    first.finish_step()
    second.skip_step(flags)
    flags = [first.measure(1.0), second.measure(1.0)]
    with pytest.raises(RuntimeError, match="have not skipped the same steps"):
        second.decide(flags)
    with pytest.raises(RuntimeError, match="have not skipped the same steps"):
        first.check([first.consolidation_flag(skipping=False), second.consolidation_flag(skipping=False)])
    first.check([first.consolidation_flag(skipping=True), second.consolidation_flag(skipping=False)])
    with pytest.raises(RuntimeError, match="Rank 1 is about to consolidate the weights"):
        first.check([first.measure(1.0), first.consolidation_flag(skipping=False)])
