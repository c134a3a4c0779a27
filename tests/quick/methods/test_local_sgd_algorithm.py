"""Local SGD without communication: when which fragment is averaged, among whom, and how long a local step is."""

from __future__ import annotations

import math
import re
from contextlib import nullcontext
from itertools import permutations
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_pipesync.core.comm.handle import Handle
from lightning_pipesync.methods.local_sgd.clock import PeriodClock, Rounds, epochs_of, steps_of
from lightning_pipesync.methods.local_sgd.config import LocalSGDConfig
from lightning_pipesync.methods.replicas.averages import divide_layers
from lightning_pipesync.methods.replicas.groups import number_of_participants
from lightning_pipesync.methods.replicas.rate_factor import LARGEST, RateFactor
from lightning_pipesync.methods.replicas.settings import Neighbors
from lightning_pipesync.methods.replicas.step_size import StepSize, measured_noise, scale_of
from tests.references.local_sgd import is_due, members
from tests.references.neighbors import contraction, mixing_matrix

# --- when -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fragments", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("period", [1, 4, 7, 12])
def test_fragments_are_averaged_at_equal_distances(period: int, fragments: int) -> None:
    """Each once in a period, the last one at its end."""
    rounds = Rounds(period, fragments)
    for step in range(1, 2 * period + 1):
        assert rounds.started(step) == sum(is_due(step, period, fragment, fragments) for fragment in range(fragments))
    assert sum(rounds.started(step) for step in range(1, period + 1)) == fragments


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, [3, 6, 12, 42, 45]),
        ({"fragments": 3}, [1, 2, 3, 4, 5, 6, 8, 10, 12, 22, 32, 42, 43, 44, 45]),
        ({"follow_lr": False}, [*range(3, 46, 3)]),
        ({"period": 4, "lighthouse": "host0:29510"}, [*range(4, 46, 4)]),
        ({"period": 1}, [*range(1, 46)]),
    ],
)
def test_periods_grow_as_the_learning_rate_falls(settings: dict[str, Any], steps: list[int]) -> None:
    """Half the rate from step 5 on, a thousandth from 10 on, and the first one again from 40 on; resumed at each step.

    A period has the length for the rate of the step with which the one before ends.
    """
    optimizer, config = SGD([torch.zeros(1)], lr=0.2), LocalSGDConfig(**{"period": 3, **settings})
    transport: Any = SimpleNamespace(row=None, ranks=None, exchange_flags=lambda flag: Handle(lambda: [flag, flag]))
    state: dict[str, Any] = {}
    started = []
    for step in range(1, 46):
        factor = RateFactor(optimizer if config.periods_follow_lr else None)
        clock = PeriodClock(config, SimpleNamespace(), transport, factor)  # type: ignore[arg-type]
        clock.load_state_dict(state)
        optimizer.param_groups[0]["lr"] = 0.2 if step < 5 or step >= 40 else 0.1 if step < 10 else 2e-4
        assert clock.may_start(step) or step == 1 or step not in steps
        started += [step] * clock.end_step(step)
        state = clock.state_dict()
    assert started == steps


def test_the_largest_rate_is_that_of_each_group() -> None:
    """The least factor counts; groups that are added, and those that never move, do not shorten it."""
    first, second, third = (torch.zeros(1, requires_grad=True) for _ in range(3))
    optimizer = SGD([{"params": [first], "lr": 1.0}, {"params": [second], "lr": torch.tensor(0.0)}], lr=1.0)
    factor = RateFactor(optimizer)
    assert factor.now() == 1
    optimizer.param_groups[0]["lr"] = 0.25
    assert factor.now() == 4
    optimizer.add_param_group({"params": [third], "lr": 3.0})
    assert factor.now() == 1
    optimizer.param_groups[2]["lr"] = 1.0
    assert factor.now() == 3
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[2]["lr"] = 0.0
    assert factor.now() == LARGEST


@pytest.mark.parametrize(
    ("period", "epochs"),
    [("0.25 epoch", 0.25), ("0.25epoch", 0.25), (".5 epoch", 0.5), ("5 epochs", 5.0), (7, None), ("selsync", None)],
)
def test_a_period_in_epochs(period: int | str, epochs: float | None) -> None:
    assert epochs_of(period) == epochs


@pytest.mark.parametrize("period", [0, -3, 2.5, True, "0 epochs", "epoch", "4", "4 steps", "nan epoch", "-1 epoch", ""])
def test_what_is_no_period(period: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"got {period!r}")):
        LocalSGDConfig(period=period)


@pytest.mark.parametrize(
    ("period", "steps_per_epoch", "steps"), [("0.25 epoch", 19, 5), ("0.01 epoch", 19, 1), ("2 epochs", 19, 38)]
)
def test_the_steps_of_a_period_in_epochs(period: str, steps_per_epoch: int, steps: int) -> None:
    assert steps_of(period, steps_per_epoch) == steps
    with pytest.raises(ValueError, match="prepare_train_loader"):
        steps_of(period, None)


@pytest.mark.parametrize(
    ("sizes", "fragments", "expected"),
    [
        ([1, 1, 1, 1], 2, [[0, 1], [2, 3]]),
        ([10, 1, 1], 3, [[0], [1], [2]]),
        ([1, 1, 10], 2, [[0, 1], [2]]),
        ([5], 1, [[0]]),
    ],
)
def test_fragments_have_about_the_same_size(sizes: list[int], fragments: int, expected: list[list[int]]) -> None:
    assert divide_layers(sizes, fragments) == expected


# --- among whom -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "world_size", "number"), [(1.0, 3, 3), (0.5, 4, 2), (0.1, 10, 1), (0.3, 3, 0), (0.7, 10, 7)]
)
def test_the_number_of_participants(share: float, world_size: int, number: int) -> None:
    assert number_of_participants(share, world_size) == number


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("neighbors", get_args(Neighbors))
def test_mixing_matrices_are_doubly_stochastic(neighbors: Neighbors, number: int) -> None:
    """And symmetric: a replica's neighbors have it as theirs, without which one would wait for ever."""
    for round_ in range(20):
        matrix = mixing_matrix(neighbors, number, round_)
        np.testing.assert_allclose(matrix.sum(axis=0), 1)
        np.testing.assert_array_equal(matrix, matrix.T)
        rows = [sorted(np.flatnonzero(row)) for row in matrix]
        assert rows == members(neighbors, None, number, round_)


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 8, 64])
def test_a_ring_contracts_by_the_second_eigenvalue(number: int) -> None:
    magnitudes = np.sort(np.abs(np.linalg.eigvalsh(mixing_matrix("ring", number))))[::-1]
    assert contraction("ring", number) == pytest.approx(magnitudes[1] if number > 1 else 0.0, abs=1e-12)
    assert contraction("all", number) == 0


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 6])
def test_pairs_contract_by_the_mean_over_all_draws(number: int) -> None:
    """Of all orders in which replicas can be drawn: the mean squared distance to the average, for any weights."""
    weights = np.random.default_rng(0).standard_normal(number)
    weights -= weights.mean()
    squares = []
    for order in permutations(range(number)):
        mixed = weights.copy()
        for first, second in zip(order[::2], order[1::2], strict=False):
            mixed[[first, second]] = (weights[first] + weights[second]) / 2
        squares.append((mixed**2).sum())
    expected = np.mean(squares) / (weights**2).sum() if number > 1 else 0.0
    assert contraction("random_pairs", number) ** 2 == pytest.approx(expected)


# --- how long a local step is -----------------------------------------------------------------------------------------

SIZE = 2000


class NoisyGradients:
    """Gradients of a fixed expectation, with noise that is a given share of their squared norm."""

    def __init__(self, noise: float) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self.expected = math.sqrt(1 - noise) * torch.randn(SIZE, generator=self._generator).sign()
        self._deviation = math.sqrt(noise)

    def draw(self) -> Tensor:
        return self.expected + self._deviation * torch.randn(SIZE, generator=self._generator)


@pytest.mark.parametrize("noise", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("steps", [8, 40])
def test_the_share_of_noise_is_measured(noise: float, steps: int) -> None:
    """Weight decay in the gradient is none."""
    for weight_decay in (0.0, 0.5):
        gradients, parameter = NoisyGradients(noise), nn.Parameter(torch.ones(SIZE))
        optimizer = Adam([parameter], lr=0.0, betas=(0.9, 0.99), weight_decay=weight_decay)
        for _ in range(steps):
            parameter.grad = gradients.draw()
            optimizer.step()
        assert measured_noise(optimizer) == pytest.approx(noise / (1 + weight_decay**2), abs=0.06)


class OfItsOwn(Optimizer):
    """Keeps moments of the names of Adam's, and neither betas nor a number of steps."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"exp_avg": parameter.grad, "exp_avg_sq": parameter.grad}


def test_what_cannot_be_measured() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    momentum, own, adam = SGD([parameter], lr=0.1, momentum=0.9), OfItsOwn([parameter]), Adam([parameter])
    assert measured_noise(adam) is None, "no step yet"
    parameter.grad = torch.ones(4)
    for optimizer in (momentum, own, adam):
        step_size = StepSize(optimizer, "auto", num_replicas=4)
        with step_size.in_use():
            optimizer.step()
        assert measured_noise(optimizer) is None, "no second moment, or of one gradient, or of an unknown kind"
        assert step_size.scale == 1
    adam.step()
    assert measured_noise(adam) == pytest.approx(0, abs=1e-6)
    parameter.grad = torch.full((4,), math.inf)
    assert measured_noise(adam) is None


@pytest.mark.parametrize(("noise", "warmup_steps"), [(0.5, 0), (0.95, 0), (0.95, 150)])
def test_the_average_moves_as_with_averaged_gradients(noise: float, warmup_steps: int) -> None:
    """Adam's, of four replicas: without a larger learning rate it moves by up to the root of four less.

    After a warm-up, too, whose second moment is that of averaged gradients at first.
    """
    replicas = 4
    assert [scale_of(0.0, replicas), scale_of(1.0, replicas), scale_of(1.0, 1)] == pytest.approx([1, 2, 1])

    def movement(lr_scale: float | str, local: bool) -> float:
        gradients = NoisyGradients(noise)
        parameters = [nn.Parameter(torch.zeros(SIZE)) for _ in range(replicas)]
        optimizers = [Adam([parameter], lr=1e-3) for parameter in parameters]
        sizes = [StepSize(optimizer, lr_scale, replicas) for optimizer in optimizers]  # type: ignore[arg-type]
        before = torch.zeros(SIZE)
        for i in range(warmup_steps + 100):
            drawn = [gradients.draw() for _ in range(replicas)]
            if i == warmup_steps:
                before = torch.stack([p.detach().clone() for p in parameters]).mean(dim=0)
            for parameter, gradient, optimizer, size in zip(parameters, drawn, optimizers, sizes, strict=True):
                is_local = local and i >= warmup_steps
                parameter.grad = gradient if is_local else sum(drawn) / replicas  # type: ignore[assignment]
                with size.in_use() if is_local else nullcontext():
                    optimizer.step()
        moved = torch.stack([p.detach() for p in parameters]).mean(dim=0) - before
        return float(-moved @ gradients.expected.sign())

    averaged_gradients = movement(1.0, local=False)
    scale = "auto" if warmup_steps else scale_of(noise, replicas)
    assert movement(scale, local=True) == pytest.approx(averaged_gradients, rel=0.1 if warmup_steps else 0.06)
    assert warmup_steps or movement(1.0, local=True) < 0.85 * averaged_gradients


def test_a_closure_finds_the_users_learning_rate() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = SGD([parameter], lr=0.1)
    step_size = StepSize(optimizer, 3.0, num_replicas=4)
    seen = []

    def closure() -> float:
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.param_groups[0]["lr"] *= 0.5
        parameter.grad = torch.ones(2)
        return 7.0

    for _ in range(3):
        with step_size.in_use():
            assert optimizer.step(closure) == 7
    assert seen == [0.1, 0.05, 0.025]
    assert parameter.tolist() == pytest.approx([1 - 3 * (0.05 + 0.025 + 0.0125)] * 2)


@pytest.mark.parametrize("learning_rate", [0.1, torch.tensor(0.1)])
def test_the_users_learning_rate_is_untouched(learning_rate: float | Tensor) -> None:
    """Also where the step raises; a decoupled weight decay is as strong as before."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = AdamW([parameter], lr=learning_rate, weight_decay=0.2, capturable=False, foreach=False)
    parameter.grad = torch.zeros(2)
    step_size = StepSize(optimizer, 3.0, num_replicas=4)
    with pytest.raises(KeyError), step_size.in_use():
        raise KeyError
    used = []
    optimizer.register_step_pre_hook(lambda *_: used.append(float(optimizer.param_groups[0]["lr"])))
    with step_size.in_use():
        assert optimizer.param_groups[0]["lr"] is learning_rate
        optimizer.step()
    assert used == pytest.approx([0.3])
    assert optimizer.param_groups[0]["lr"] is learning_rate
    assert optimizer.param_groups[0]["weight_decay"] == 0.2
    assert torch.allclose(parameter, torch.full((2,), 1 - 0.1 * 0.2))
