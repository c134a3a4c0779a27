"""What is written to ``p.grad`` after DeAR has sent it would be lost, and is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_pipesync import DeAR
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import assert_raised, on_ranks, raised
from tests.support.method_runs import SMALL
from tests.support.models import OPTIMIZERS, Averaged, Run, assert_same, loss, seeded_mlp, state, train_ddp

Write = Callable[[nn.Module], object]


def clip(model: nn.Module) -> object:
    return nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def write_anew(model: nn.Module) -> None:
    model[0].weight.grad = torch.zeros_like(model[0].weight)


def write_none(model: nn.Module) -> None:
    model.zero_grad()


def read(model: nn.Module) -> object:
    return [float(parameter.grad.norm()) for parameter in model.parameters()]


def train(write: Write | None, after: str = "", on: tuple[int, ...] = (0, 1), timeout_s: float = 60) -> tuple[Any, Any]:
    """Returns the error of a step before which something is written, and the state of the model."""
    run = Run(DeAR, **SMALL, timeout_s=timeout_s)
    model, sync = run.model, run.sync

    def step() -> None:
        sync.step()
        sync.flush()

    run.steps(range(4))
    run.backward(4)
    if after == "reduce":
        sync.reduce()
    elif after == "clip":
        sync.clip(1e9)
    elif after in ("no_sync", "anew"):
        if after == "anew":  # the new gradients may be where the old ones were in memory
            run.optimizer.zero_grad()
        with sync.no_sync():
            loss(model, 5, dist.get_rank()).backward()
    if write is not None and dist.get_rank() in on:
        write(model)
    error = raised(step)
    sync.detach()
    return error, state(model)


def take_turns(method: Callable[..., Any]) -> dict[str, Any]:
    """Each of two optimizers discards what the other's loss has left in its gradients, and zeroes its own."""
    model = seeded_mlp()
    first, second = OPTIMIZERS["sgd"](model[0]), OPTIMIZERS["sgd"](model[2])
    sync = method(model, [first, second])

    def update(own: torch.optim.Optimizer) -> None:
        own.step()
        own.zero_grad()

    for step in range(4):
        for own, other in ((first, second), (second, first)):
            own.zero_grad()
            loss(model, step, dist.get_rank()).backward()
            other.zero_grad()
            sync.reduce(own)
            sync.step(partial(update, own), own)
    sync.flush()
    sync.detach()
    return state(model)


WRITTEN = [(clip, ""), (clip, "reduce"), (clip, "clip"), (None, "no_sync"), (None, "anew")]
WRITERS = [(write_anew, 1), (write_none, 0)]
DEAR = partial(DeAR, **SMALL, timeout_s=60)


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    cases: dict[Any, Any] = {row: partial(train, *row) for row in WRITTEN}
    cases |= {"ddp": partial(train_ddp, "sgd", 5), "read": partial(train, read)}
    return launch_cases({**cases, "turns": partial(take_turns, DEAR), "plain turns": partial(take_turns, Averaged)}, 2)


@pytest.mark.parametrize("row", WRITTEN)
def test_a_written_gradient_is_refused(row: Any, outcomes: Outcomes) -> None:
    for error, _ in outcomes[row]:
        assert_raised(error, "RuntimeError", "was written to after the backward pass", "no_sync()")


@pytest.mark.parametrize("row", WRITERS)
def test_a_rank_that_alone_writes_is_named(row: Any) -> None:
    write, writer = row
    errors = [error for error, _ in on_ranks(train, 2, write, "", (writer,), 10)]  # it detaches: no news of it
    assert_raised(errors[writer], "RuntimeError", "was written to after the backward pass")
    assert_raised(errors[1 - writer], "RuntimeError", f"Rank {writer} ")


def test_what_is_not_applied_may_be_discarded(outcomes: Outcomes) -> None:
    for weights in outcomes["turns"]:
        assert_same(weights, outcomes["plain turns"][0])


def test_a_gradient_may_be_read(outcomes: Outcomes) -> None:
    for error, weights in outcomes["read"]:
        assert error is None
        assert_same(weights, outcomes["ddp"][0])
