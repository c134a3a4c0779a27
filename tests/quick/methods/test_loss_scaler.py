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
from tests.support.harness import assert_raised, raised
from tests.support.models import Averaged, assert_same, loss, seeded_mlp, state

STEPS, OVERFLOW = 6, 3

METHODS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "averaged": (Averaged, {}),
    "dear": (DeAR, {}),
    "dear, sharded": (DeAR, {"update": "sharded"}),
    "parameter_server": (ParameterServer, {"policy": "sync"}),
    "parameter_server, one": (ParameterServer, {"policy": "sync", "servers": 1}),
    "pipe_sgd": (PipeSGD, {"staleness": 0}),
    "selsync": (SelSync, {"delta": 0.0, "aggregation": "gradients"}),
    "local_sgd": (LocalSGD, {"warmup_steps": 1000}),
}
#: Methods each of whose ranks may step alone.
LOCAL: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {"own steps": (SelSync, {}), "own period": (LocalSGD, {})}
#: Methods that apply what is not in ``p.grad``; the others average what a scaler has unscaled before.
APART = ("dear", "dear, sharded", "parameter_server")
REFUSED = (*APART, "pipe_sgd", "selsync", "local_sgd")

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "momentum": lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9),
    "fused momentum": lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True),
    "fused adamw": lambda model: AdamW(model.parameters(), lr=0.01, fused=True),
}


class Scaled:
    """A training with a loss scaler."""

    def __init__(self, method: str, optimizer: str, enabled: bool = True, growth_interval: int = 2) -> None:
        self.model = seeded_mlp()
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        self.scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=growth_interval, enabled=enabled)
        make, settings = {**METHODS, **LOCAL}[method]
        self.sync = make(self.model, self.optimizer, **settings, **({} if make is Averaged else {"timeout_s": 60}))
        self.skipped: list[bool] = []

    def backward(self, step: int) -> None:
        """Computes a gradient of which one value is not finite on rank 1 in one of the steps."""
        self.model.zero_grad()
        of_step = loss(self.model, step, dist.get_rank())
        if step == OVERFLOW and dist.get_rank() == 1:
            of_step = of_step + torch.inf * self.model[-1].bias[0]
        self.scaler.scale(of_step).backward()

    def scaled_step(self) -> None:
        self.sync.step(lambda: self.scaler.step(self.optimizer))

    def step(self, step: int) -> None:
        """The recipe."""
        self.backward(step)
        self.sync.reduce(scaler=self.scaler)
        self.scaled_step()
        before = self.scaler.get_scale()
        self.scaler.update()
        self.skipped.append(self.scaler.get_scale() < before)

    def end(self) -> dict[str, Tensor]:
        self.sync.flush()
        self.sync.detach()
        return state(self.model)


def train(method: str, optimizer: str) -> tuple[dict[str, Tensor], float]:
    run = Scaled(method, optimizer)
    for step in range(STEPS):
        run.step(step)
    return run.end(), run.scaler.get_scale()


def train_unequally(method: str) -> tuple[dict[str, Tensor], list[bool]]:
    """Rank 1 takes one step more before a flush; returns the weights, and which steps after it are skipped."""
    run = Scaled(method, "momentum", growth_interval=100)
    for step in range(1 + dist.get_rank()):
        run.step(step)
    run.sync.flush()
    run.skipped.clear()
    for step in range(OVERFLOW - 1, STEPS):
        run.step(step)
    return run.end(), run.skipped


def train_without_scaling() -> bool:
    """Returns whether a gradient that is not finite was applied, as it is by DDP: a disabled scaler is none."""
    run = Scaled("dear", "momentum", enabled=False)
    for step in range(OVERFLOW + 1):
        run.step(step)
    return not all(bool(value.isfinite().all()) for value in run.end().values())


def overflow_at_first(method: str) -> bool:
    """Returns whether the optimizer has a state after a first step that overflows on rank 1."""
    run = Scaled(method, "fused momentum")
    run.step(OVERFLOW)
    run.sync.detach()
    return any(bool(kept) for kept in run.optimizer.state.values())


def unscale_not_at_all(run: Scaled) -> None:
    run.scaled_step()


def unscale_without_the_method(run: Scaled) -> None:
    run.scaler.unscale_(run.optimizer)
    run.scaled_step()


def unscale_before_the_method(run: Scaled) -> None:
    run.scaler.unscale_(run.optimizer)
    run.sync.reduce()
    run.scaled_step()


def overlook_an_overflow(run: Scaled) -> None:
    run.sync.reduce(scaler=run.scaler)
    run.sync.step()


def misuse(wrong: Callable[[Scaled], None], method: str, optimizer: str) -> tuple[tuple[str, str] | None, bool]:
    """Returns the error of a training, and whether the weights stayed finite."""
    run = Scaled(method, optimizer)

    def train_on() -> None:
        for step in range(STEPS):
            run.backward(step)
            wrong(run)
            run.scaler.update()

    error = raised(train_on)
    run.sync.detach()
    return error, all(bool(value.isfinite().all()) for value in state(run.model).values())


MISUSES = [
    *product((unscale_not_at_all, unscale_without_the_method), REFUSED, OPTIMIZERS),
    *product((unscale_before_the_method,), APART, OPTIMIZERS),
    *product((overlook_an_overflow,), ("dear", "parameter_server"), ("momentum",)),
]
SERVERS = ("parameter_server", "parameter_server, one")


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    cases: dict[Any, Any] = {one: partial(train, *one) for one in product(METHODS, OPTIMIZERS)}
    cases |= {one: partial(misuse, *one) for one in MISUSES}
    cases |= {(overflow_at_first, name): partial(overflow_at_first, name) for name in LOCAL}
    cases |= {(train_unequally, name): partial(train_unequally, name) for name in SERVERS}
    return launch_cases({**cases, "disabled": train_without_scaling}, 2)


def test_all_ranks_skip_a_step_that_overflows_on_one(outcomes: Outcomes) -> None:
    for method, optimizer in product(METHODS, OPTIMIZERS):
        for (weights, scale), expected in zip(
            outcomes[method, optimizer], outcomes["averaged", optimizer], strict=True
        ):
            assert scale == expected[1] < 2.0**12, "one of the steps was skipped"
            torch.testing.assert_close(weights, expected[0], msg=lambda text, row=(method, optimizer): f"{row}: {text}")


@pytest.mark.parametrize("method", SERVERS)
def test_all_ranks_skip_the_same_steps_after_unequal_numbers_of_them(method: str, outcomes: Outcomes) -> None:
    (weights, skipped), (others, also) = outcomes[train_unequally, method]
    assert skipped == also == [False, True, False, False]
    assert_same(weights, others)


@pytest.mark.parametrize("wrong", dict.fromkeys(row[0] for row in MISUSES))
def test_a_gradient_that_the_method_has_not_unscaled_is_refused(wrong: Any, outcomes: Outcomes) -> None:
    """On every rank, and so is a step without the scaler if the gradient is not finite on one rank."""
    words = ["sync.reduce(scaler=scaler)", *(["not finite"] if wrong is overlook_an_overflow else [])]
    for row in (row for row in MISUSES if row[0] is wrong):
        for error, is_finite in outcomes[row]:
            assert_raised(error, "RuntimeError", *words)
            assert is_finite, row


def test_a_disabled_scaler_is_none(outcomes: Outcomes) -> None:
    assert outcomes["disabled"] == [True, True]


@pytest.mark.parametrize("method", LOCAL)
def test_a_fused_optimizer_that_skips_its_first_step_gets_no_state(method: str, outcomes: Outcomes) -> None:
    """PyTorch would give it momentum from memory that nobody has written to."""
    assert outcomes[overflow_at_first, method] == [True, False]
