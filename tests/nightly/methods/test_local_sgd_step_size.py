"""The length of local steps: how it is measured, what it does to Adam, and what it leaves alone."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_pipesync import LocalSGD
from lightning_pipesync.methods.replicas.step_size import StepSize, measured_noise, scale_of
from tests.references.local_sgd import simulate
from tests.support.harness import on_ranks
from tests.support.models import Run, assert_same, loss, seeded_mlp, state

STEPS = 20
SIZE = 4000


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
    gradients, parameter = NoisyGradients(noise), nn.Parameter(torch.zeros(SIZE))
    optimizer = Adam([parameter], betas=(0.9, 0.99))
    for _ in range(steps):
        parameter.grad = gradients.draw()
        optimizer.step()
    assert measured_noise(optimizer) == pytest.approx(noise, abs=0.06)


def test_what_cannot_be_measured() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    momentum, adam = SGD([parameter], lr=0.1, momentum=0.9), Adam([parameter])
    assert measured_noise(adam) is None, "no step yet"
    parameter.grad = torch.ones(4)
    for optimizer in (momentum, adam):
        optimizer.step()
        assert measured_noise(optimizer) is None, "no second moment, or of one gradient"
    adam.step()
    assert measured_noise(adam) == pytest.approx(0, abs=1e-6)
    parameter.grad = torch.full((4,), math.inf)
    assert measured_noise(adam) is None


@pytest.mark.parametrize("noise", [0.5, 0.95])
def test_the_average_moves_as_with_averaged_gradients(noise: float) -> None:
    """Adam's, of four replicas: without a larger learning rate it moves by up to the root of four less."""
    replicas, learning_rate = 4, 1e-3

    def movement(scale: float, average: bool) -> float:
        gradients = NoisyGradients(noise)
        parameters = [nn.Parameter(torch.zeros(SIZE)) for _ in range(replicas)]
        optimizers = [Adam([parameter], lr=scale * learning_rate) for parameter in parameters]
        for _ in range(100):
            drawn = [gradients.draw() for _ in range(replicas)]
            for parameter, gradient, optimizer in zip(parameters, drawn, optimizers, strict=True):
                parameter.grad = sum(drawn) / replicas if average else gradient
                optimizer.step()
        moved = torch.stack([p.detach() for p in parameters]).mean(dim=0)
        return float(-moved @ gradients.expected.sign())

    averaged_gradients = movement(1.0, average=True)
    assert movement(scale_of(noise, replicas), average=False) == pytest.approx(averaged_gradients, rel=0.06)
    assert movement(1.0, average=False) < 0.85 * averaged_gradients


@pytest.mark.parametrize("steps", [50, 200])
def test_after_a_warm_up_the_average_moves_as_with_averaged_gradients(steps: int) -> None:
    """Whose second moment is that of averaged gradients at first."""
    replicas, warm_up = 4, 300

    def movement(local: bool) -> float:
        gradients = NoisyGradients(0.95)
        parameters = [nn.Parameter(torch.zeros(SIZE)) for _ in range(replicas)]
        optimizers = [Adam([parameter], lr=1e-3) for parameter in parameters]
        sizes = [StepSize(optimizer, "auto", replicas) for optimizer in optimizers]
        before = torch.zeros(SIZE)
        for i in range(warm_up + steps):
            drawn = [gradients.draw() for _ in range(replicas)]
            if i == warm_up:
                before = torch.stack([p.detach().clone() for p in parameters]).mean(dim=0)
            for parameter, gradient, optimizer, size in zip(parameters, drawn, optimizers, sizes, strict=True):
                is_local = local and i >= warm_up
                parameter.grad = gradient if is_local else sum(drawn) / replicas
                with size.in_use() if is_local else nullcontext():
                    optimizer.step()
        moved = torch.stack([p.detach() for p in parameters]).mean(dim=0) - before
        return float(-moved @ gradients.expected.sign())

    assert movement(local=True) == pytest.approx(movement(local=False), rel=0.1)


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


def test_weight_decay_in_the_gradient_is_no_noise() -> None:
    gradients, parameter = NoisyGradients(1.0), nn.Parameter(torch.ones(SIZE))
    optimizer = Adam([parameter], lr=0.0, weight_decay=0.5)
    for _ in range(40):
        parameter.grad = gradients.draw()
        optimizer.step()
    assert measured_noise(optimizer) == pytest.approx(1 / 1.25, abs=0.06)


class OfItsOwn(Optimizer):
    """Keeps moments of the names of Adam's, and neither betas nor a number of steps."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"exp_avg": parameter.grad, "exp_avg_sq": parameter.grad}


def test_other_optimizers_are_not_measured() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = OfItsOwn([parameter])
    step_size = StepSize(optimizer, "auto", num_replicas=4)
    for _ in range(20):
        parameter.grad = torch.ones(2)
        with step_size.in_use():
            optimizer.step()
    assert step_size.scale == 1


def test_limits() -> None:
    assert scale_of(0.0, 16) == 1
    assert scale_of(1.0, 16) == pytest.approx(4)
    assert scale_of(1.0, 1) == 1


@pytest.mark.parametrize("learning_rate", [0.1, torch.tensor(0.1)])
def test_the_users_learning_rate_is_untouched(learning_rate: float | Tensor) -> None:
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
    assert torch.allclose(parameter, torch.full((2,), 1 - 0.1 * 0.2)), "decoupled decay is not scaled"


def adamw(model: nn.Module, learning_rate: float = 0.01, weight_decay: float = 0.02) -> Optimizer:
    return AdamW(model.parameters(), lr=learning_rate, weight_decay=weight_decay)


def train(settings: dict[str, Any], resumed_at: int | None = None) -> tuple[dict[str, Tensor], float]:
    run = Run(LocalSGD, adamw, period=4, **settings)
    for i in range(STEPS):
        if i == resumed_at:
            run = run.resumed(seeded_mlp(1))
        run.step(i)
    run.sync.detach()
    return state(run.model), run.sync.metrics()["lr_scale"]


def test_a_given_scale() -> None:
    """Bit for bit that of optimizers with a larger learning rate, and a weight decay that is as strong as before."""
    replicas, _ = simulate(
        seeded_mlp(), lambda model: adamw(model, 0.01 * 1.5, 0.02 / 1.5), loss, world_size=2, num_steps=STEPS, period=4
    )
    for rank, (weights, scale) in enumerate(on_ranks(train, 2, {"lr_scale": 1.5})):
        assert scale == 1.5
        assert_same(weights, replicas[rank].state_dict())


def test_the_measured_scale_resumes() -> None:
    for (weights, scale), (again, scale_again) in zip(on_ranks(train, 2, {}), on_ranks(train, 2, {}, 11), strict=True):
        assert 1 < scale <= math.sqrt(2)
        assert scale == scale_again
        assert_same(weights, again)
