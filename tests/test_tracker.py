"""The relative gradient change of Eq. 2."""

from __future__ import annotations

import math
import random

import pytest
import torch

from lightning_pipesync.core.norm import SquaredNorm
from lightning_pipesync.methods.selsync import GradientChangeTracker
from tests.reference_selsync import relative_change


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
def test_what_is_not_finite_calls_for_a_synchronized_step_and_is_left_out(value: float) -> None:
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


def test_squared_norm() -> None:
    gradients = [torch.randn(5, 3), torch.randn(7, dtype=torch.float64), torch.randn(4, dtype=torch.bfloat16)]
    expected = sum(gradient.double().square().sum().item() for gradient in gradients)
    assert SquaredNorm(gradients).item() == pytest.approx(expected, rel=1e-6)
    assert SquaredNorm(gradients[:1]).item() == pytest.approx(gradients[0].double().square().sum().item(), rel=1e-6)
    assert SquaredNorm([]).item() == 0.0
    assert SquaredNorm([torch.tensor([1.5e19])] * 2).item() == pytest.approx(4.5e38, rel=1e-6), "beyond fp32"
    assert math.isinf(SquaredNorm([torch.tensor([math.inf])]).item())
    assert math.isnan(SquaredNorm([torch.tensor([math.nan])]).item())
