"""A loss scaler in a plain loop: one recipe for all methods, and what would apply a scaled gradient is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, AdamW, Optimizer

from lightning_pipesync import DeAR, LocalSGD, ParameterServer, PipeSGD, SelSync
from tests.harness import launch, raised
from tests.models import average_gradients, loss, seeded_mlp, state

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


def train_all(optimizer_name: str) -> dict[str, tuple[dict[str, Tensor], float]]:
    trained = {method: train_with(method, optimizer_name) for method in METHODS}
    return {"plain": train_plainly(optimizer_name), **trained}


@cache
def trained(optimizer_name: str) -> list[dict[str, tuple[dict[str, Tensor], float]]]:
    return launch(train_all, 2, optimizer_name)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_all_ranks_skip_a_step_that_overflows_on_one(optimizer: str, method: str) -> None:
    for of_rank in trained(optimizer):
        (weights, scale), (expected, expected_scale) = of_rank[method], of_rank["plain"]
        assert scale == expected_scale < 2.0**12, "one of the steps was skipped"
        torch.testing.assert_close(weights, expected)


def scale_without_the_method(sync: Any, optimizer: Optimizer, scaler: GradScaler) -> None:
    sync.step(lambda: scaler.step(optimizer))


def unscale_without_the_method(sync: Any, optimizer: Optimizer, scaler: GradScaler) -> None:
    scaler.unscale_(optimizer)
    sync.step(lambda: scaler.step(optimizer))


def unscale_first(sync: Any, optimizer: Optimizer, scaler: GradScaler) -> None:
    scaler.unscale_(optimizer)
    sync.reduce()
    sync.step(lambda: scaler.step(optimizer))


MISUSES = {step.__name__: step for step in (scale_without_the_method, unscale_without_the_method, unscale_first)}


def misuse_all(misuse: str) -> dict[tuple[str, str], tuple[tuple[str, str] | None, bool]]:
    """Returns by method and optimizer the error of a training, and whether the weights stayed finite."""
    outcomes = {}
    for optimizer_name in OPTIMIZERS:
        for method in METHODS:
            model, optimizer, scaler = prepared(optimizer_name)
            sync = METHODS[method](model, optimizer, timeout_s=5)

            def train_on() -> None:
                for step in range(STEPS):
                    scaled_backward(model, scaler, step)  # noqa: B023 - called at once
                    MISUSES[misuse](sync, optimizer, scaler)  # noqa: B023
                    scaler.update()  # noqa: B023

            error = raised(train_on)
            sync.detach()
            finite = all(bool(torch.isfinite(value).all()) for value in state(model).values())
            outcomes[method, optimizer_name] = error, finite
    return outcomes


@cache
def misused(misuse: str) -> list[dict[tuple[str, str], tuple[tuple[str, str] | None, bool]]]:
    return launch(misuse_all, 2, misuse)


#: Methods that apply what is not in ``p.grad``; the others average what a scaler has unscaled before.
APART = ("dear", "dear, sharded", "parameter_server")


@pytest.mark.parametrize(
    ("misuse", "method"), [(m, n) for m in MISUSES for n in METHODS if m != "unscale_first" or n in APART]
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_gradient_that_the_method_has_not_unscaled_is_refused(misuse: str, optimizer: str, method: str) -> None:
    """On every rank, in the first step."""
    for of_rank in misused(misuse):
        error, finite = of_rank[method, optimizer]
        assert error is not None
        assert "sync.reduce(scaler=scaler)" in error[1]
        assert finite


def overlook_an_overflow() -> dict[str, tuple[str, str] | None]:
    """A loop that steps without its scaler after a gradient that is not finite on one rank."""
    outcomes = {}
    for method in ("dear", "parameter_server"):
        model, optimizer, scaler = prepared("momentum")
        sync = METHODS[method](model, optimizer, timeout_s=5)
        for step in range(OVERFLOW):
            scaled_backward(model, scaler, step)
            sync.reduce(scaler=scaler)
            sync.step(lambda: scaler.step(optimizer))  # noqa: B023 - called at once
            scaler.update()
        scaled_backward(model, scaler, OVERFLOW)
        sync.reduce(scaler=scaler)
        outcomes[method] = raised(sync.step)
        sync.detach()
    return outcomes


def test_a_step_that_overlooks_an_overflow_is_refused_on_all_ranks() -> None:
    for of_rank in launch(overlook_an_overflow, 2):
        for error in of_rank.values():
            assert error is not None
            assert "not finite" in error[1]
            assert "sync.reduce(scaler=scaler)" in error[1]


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
    return all(bool(value.isfinite().all()) for value in state(model).values()), scaler.get_scale()


def test_former_names_of_reduce_warn() -> None:
    assert launch(call_by_former_names, 2) == [(True, 2.0**10)] * 2


def train_without_scaling() -> bool:
    """A scaler that is not enabled, as scripts have it for other precisions, is none."""
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


def test_a_disabled_scaler_is_none() -> None:
    """A gradient that is not finite is applied, as it is by DDP."""
    assert all(launch(train_without_scaling, 2))


def overflow_at_first() -> dict[str, bool]:
    """Returns whether the optimizer has a state after a first step that overflows on rank 1."""
    states = {}
    for name, method in (("selsync", SelSync), ("local_sgd", LocalSGD)):
        model, optimizer, scaler = prepared("fused momentum")
        sync = method(model, optimizer)
        scaled_backward(model, scaler, OVERFLOW)
        sync.reduce(scaler=scaler)
        sync.step(lambda: scaler.step(optimizer))  # noqa: B023 - called at once
        states[name] = any(bool(state) for state in optimizer.state.values())
        sync.detach()
    return states


def test_a_fused_optimizer_that_skips_its_first_step_gets_no_state() -> None:
    """PyTorch would give it momentum from memory that nobody has written to."""
    first, second = launch(overflow_at_first, 2)
    assert all(first.values())
    assert not any(second.values())
