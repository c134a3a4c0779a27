"""A loss scaler in a plain loop: one recipe for all methods, and what would apply a scaled gradient is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, AdamW, Optimizer

from lightning_pipesync import DeAR, LocalSGD, ParameterServer, PipeSGD, SelSync
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import raised
from tests.support.models import assert_same, average_gradients, loss, seeded_mlp, state

STEPS, OVERFLOW = 6, 3

METHODS: dict[str, Callable[..., Any]] = {
    "dear": lambda *trained, **settings: DeAR(*trained, **settings),
    "dear, sharded": lambda *trained, **settings: DeAR(*trained, update="sharded", **settings),
    "parameter_server": lambda *trained, **settings: ParameterServer(*trained, policy="sync", **settings),
    "pipe_sgd": lambda *trained, **settings: PipeSGD(*trained, staleness=0, **settings),
    "selsync": lambda *trained, **settings: SelSync(*trained, delta=0.0, aggregation="gradients", **settings),
    "local_sgd": lambda *trained, **settings: LocalSGD(*trained, warmup_steps=1000, **settings),
}

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "momentum": lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9),
    "fused momentum": lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True),
    "fused adamw": lambda model: AdamW(model.parameters(), lr=0.01, fused=True),
}


def prepared(optimizer_name: str) -> tuple[nn.Module, Optimizer, GradScaler]:
    model = seeded_mlp()
    return model, OPTIMIZERS[optimizer_name](model), GradScaler("cpu", init_scale=2.0**10, growth_interval=2)


def scaled_backward(model: nn.Module, scaler: GradScaler, step: int) -> None:
    """Computes a gradient that is not finite on rank 1 in one of the steps."""
    model.zero_grad()
    factor = torch.inf if step == OVERFLOW and dist.get_rank() == 1 else 1.0
    scaler.scale(loss(model, step, dist.get_rank()) * factor).backward()


def finite(model: nn.Module) -> bool:
    return all(bool(value.isfinite().all()) for value in state(model).values())


def train_plainly(optimizer_name: str) -> tuple[dict[str, Tensor], float]:
    model, optimizer, scaler = prepared(optimizer_name)
    for step in range(STEPS):
        scaled_backward(model, scaler, step)
        average_gradients(model)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return state(model), scaler.get_scale()


def train_with(method: str, optimizer_name: str) -> tuple[dict[str, Tensor], float]:
    model, optimizer, scaler = prepared(optimizer_name)
    sync = METHODS[method](model, optimizer)
    for step in range(STEPS):
        scaled_backward(model, scaler, step)
        sync.reduce(scaler=scaler)
        sync.step(lambda: scaler.step(optimizer))
        scaler.update()
    sync.flush()
    sync.detach()
    return state(model), scaler.get_scale()


def scale_without_the_method(sync: Any, optimizer: Optimizer, scaler: GradScaler) -> None:
    sync.step(lambda: scaler.step(optimizer))


def unscale_without_the_method(sync: Any, optimizer: Optimizer, scaler: GradScaler) -> None:
    scaler.unscale_(optimizer)
    sync.step(lambda: scaler.step(optimizer))


def unscale_first(sync: Any, optimizer: Optimizer, scaler: GradScaler) -> None:
    scaler.unscale_(optimizer)
    sync.reduce()
    sync.step(lambda: scaler.step(optimizer))


def misuse(how: Callable[..., None], method: str, optimizer_name: str) -> tuple[tuple[str, str] | None, bool]:
    """Returns the error of a training, and whether the weights stayed finite."""
    model, optimizer, scaler = prepared(optimizer_name)
    sync = METHODS[method](model, optimizer, timeout_s=5)

    def train_on() -> None:
        for step in range(STEPS):
            scaled_backward(model, scaler, step)
            how(sync, optimizer, scaler)
            scaler.update()

    error = raised(train_on)
    sync.detach()
    return error, finite(model)


def overlook_an_overflow(method: str) -> tuple[str, str] | None:
    """Steps without the scaler after a gradient that is not finite on one rank."""
    model, optimizer, scaler = prepared("momentum")
    sync = METHODS[method](model, optimizer, timeout_s=5)
    for step in range(OVERFLOW):
        scaled_backward(model, scaler, step)
        sync.reduce(scaler=scaler)
        sync.step(lambda: scaler.step(optimizer))
        scaler.update()
    scaled_backward(model, scaler, OVERFLOW)
    sync.reduce(scaler=scaler)
    error = raised(sync.step)
    sync.detach()
    return error


def call_by_former_names() -> tuple[bool, float]:
    model, optimizer, scaler = prepared("momentum")
    sync = DeAR(model, optimizer)
    scaled_backward(model, scaler, 0)
    with pytest.warns(FutureWarning, match="reduce"):
        sync.unscale(scaler)
    with pytest.warns(FutureWarning, match="reduce"):
        sync.after_backward()
    sync.step(lambda: scaler.step(optimizer))
    sync.flush()
    sync.detach()
    return finite(model), scaler.get_scale()


def train_without_scaling() -> bool:
    """Returns whether a gradient that is not finite was applied, as it is by DDP: a disabled scaler is none."""
    model, optimizer, _ = prepared("momentum")
    scaler = GradScaler("cpu", enabled=False)
    sync = DeAR(model, optimizer)
    for step in range(OVERFLOW + 1):
        scaled_backward(model, scaler, step)
        sync.reduce(scaler=scaler)
        sync.step(lambda: scaler.step(optimizer))
    sync.flush()
    sync.detach()
    return all(bool(value.isnan().any()) for value in state(model).values())


def overflow_at_first(method: Callable[..., Any]) -> bool:
    """Returns whether the optimizer has a state after a first step that overflows on rank 1."""
    model, optimizer, scaler = prepared("fused momentum")
    sync = method(model, optimizer)
    scaled_backward(model, scaler, OVERFLOW)
    sync.reduce(scaler=scaler)
    sync.step(lambda: scaler.step(optimizer))
    sync.detach()
    return any(bool(state) for state in optimizer.state.values())


def train_unequally(servers: int) -> tuple[dict[str, Tensor], list[bool]]:
    """Rank 1 takes one step more before a flush; returns the weights, and which steps after it are skipped."""
    model, optimizer, _ = prepared("momentum")
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    sync = METHODS["parameter_server"](model, optimizer, servers=servers, timeout_s=5)
    skipped = []

    def step(number: int) -> None:
        scaled_backward(model, scaler, number)
        sync.reduce(scaler=scaler)
        sync.step(lambda: scaler.step(optimizer))
        before = scaler.get_scale()
        scaler.update()
        skipped.append(scaler.get_scale() < before)

    for number in range(1 + dist.get_rank()):
        step(number)
    sync.flush()
    skipped.clear()
    for number in range(OVERFLOW - 1, STEPS):
        step(number)
    sync.flush()
    sync.detach()
    return state(model), skipped


#: Methods that apply what is not in ``p.grad``; the others average what a scaler has unscaled before.
APART = ("dear", "dear, sharded", "parameter_server")
MISUSES = [
    *product((scale_without_the_method, unscale_without_the_method), METHODS, OPTIMIZERS),
    *product((unscale_first,), APART, OPTIMIZERS),
]
OVERLOOKING = ("dear", "parameter_server")
LOCAL = (SelSync, LocalSGD)


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    cases: dict[Any, Any] = {name: partial(train_plainly, name) for name in OPTIMIZERS}
    cases |= {one: partial(train_with, *one) for one in product(METHODS, OPTIMIZERS)}
    cases |= {one: partial(misuse, *one) for one in MISUSES}
    cases |= {(overlook_an_overflow, name): partial(overlook_an_overflow, name) for name in OVERLOOKING}
    cases |= {(overflow_at_first, method): partial(overflow_at_first, method) for method in LOCAL}
    cases |= {("unequal", servers): partial(train_unequally, servers) for servers in (1, 2)}
    return launch_cases({**cases, "former names": call_by_former_names, "disabled": train_without_scaling}, 2)


@pytest.mark.parametrize(("method", "optimizer"), product(METHODS, OPTIMIZERS))
def test_all_ranks_skip_a_step_that_overflows_on_one(method: str, optimizer: str, outcomes: Outcomes) -> None:
    for (weights, scale), expected in zip(outcomes[method, optimizer], outcomes[optimizer], strict=True):
        assert scale == expected[1] < 2.0**12, "one of the steps was skipped"
        torch.testing.assert_close(weights, expected[0])


@pytest.mark.parametrize("servers", [1, 2])
def test_all_ranks_skip_the_same_steps_after_unequal_numbers_of_them(servers: int, outcomes: Outcomes) -> None:
    (weights, skipped), (others, also) = outcomes["unequal", servers]
    assert skipped == also == [False, True, False, False]
    assert_same(weights, others)


@pytest.mark.parametrize(("how", "method", "optimizer"), MISUSES)
def test_a_gradient_that_the_method_has_not_unscaled_is_refused(
    how: Callable[..., None], method: str, optimizer: str, outcomes: Outcomes
) -> None:
    """On every rank, in the first step."""
    for error, is_finite in outcomes[how, method, optimizer]:
        assert error is not None
        assert "sync.reduce(scaler=scaler)" in error[1]
        assert is_finite


@pytest.mark.parametrize("method", OVERLOOKING)
def test_a_step_that_overlooks_an_overflow_is_refused_on_all_ranks(method: str, outcomes: Outcomes) -> None:
    for error in outcomes[overlook_an_overflow, method]:
        assert error is not None
        assert "not finite" in error[1]
        assert "sync.reduce(scaler=scaler)" in error[1]


def test_former_names_of_reduce_warn(outcomes: Outcomes) -> None:
    assert outcomes["former names"] == [(True, 2.0**10)] * 2


def test_a_disabled_scaler_is_none(outcomes: Outcomes) -> None:
    assert outcomes["disabled"] == [True, True]


@pytest.mark.parametrize("method", LOCAL)
def test_a_fused_optimizer_that_skips_its_first_step_gets_no_state(method: Any, outcomes: Outcomes) -> None:
    """PyTorch would give it momentum from memory that nobody has written to."""
    assert outcomes[overflow_at_first, method] == [True, False]
