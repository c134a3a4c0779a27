"""What is written to ``p.grad`` after DeAR has sent it would be lost, and is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_pipesync import DeAR
from tests.support.harness import assert_raised, on_ranks, raised
from tests.support.models import OPTIMIZERS, Run, assert_same, average_gradients, loss, seeded_mlp, state, train_ddp

Write = Callable[[nn.Module], object]
WRITTEN = "was written to after the backward pass"


def clip(model: nn.Module) -> object:
    return nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def write_anew(model: nn.Module) -> None:
    model[0].weight.grad = torch.zeros_like(model[0].weight)


def write_none(model: nn.Module) -> None:
    model.zero_grad()


def train(write: Write | None, after: str = "", on: tuple[int, ...] = (0, 1)) -> tuple[Any, Any]:
    """Returns the error of a step before which something is written, and the state of the model."""
    run = Run(DeAR, bucket_mb=1e-4, timeout_s=10)
    model, sync = run.model, run.sync

    def step() -> None:
        sync.step()
        sync.flush()

    run.steps(range(4))
    run.backward(4)
    if after == "after_backward":
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


@pytest.mark.parametrize(
    ("write", "after"), [(clip, ""), (clip, "after_backward"), (clip, "clip"), (None, "no_sync"), (None, "anew")]
)
def test_a_written_gradient_is_refused(write: Write | None, after: str) -> None:
    for error, _ in on_ranks(train, 2, write, after):
        assert_raised(error, "RuntimeError", f"{WRITTEN}, or by a further one under no_sync()")


@pytest.mark.parametrize(("write", "writer"), [(write_anew, 1), (write_none, 0)])
def test_a_rank_that_alone_writes_is_named(write: Write, writer: int) -> None:
    errors = [error for error, _ in on_ranks(train, 2, write, "", (writer,))]
    assert_raised(errors[writer], "RuntimeError", WRITTEN)
    assert_raised(errors[1 - writer], "RuntimeError", f"Rank {writer} ")


def take_turns() -> dict[str, Any]:
    """Each of two optimizers discards what the other's loss has left in its gradients, and zeroes its own."""
    model = seeded_mlp()
    first, second = OPTIMIZERS["sgd"](model[0]), OPTIMIZERS["sgd"](model[2])
    sync = DeAR(model, [first, second], bucket_mb=1e-4, timeout_s=10)

    def update(optimizer: Optimizer) -> None:
        optimizer.step()
        optimizer.zero_grad()

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


def take_turns_plainly() -> dict[str, Any]:
    model = seeded_mlp()
    first, second = OPTIMIZERS["sgd"](model[0]), OPTIMIZERS["sgd"](model[2])
    for step in range(4):
        for own in (first, second):
            model.zero_grad()
            loss(model, step, dist.get_rank()).backward()
            average_gradients(model)
            own.step()
    return state(model)


def both_turns() -> tuple[dict[str, Any], dict[str, Any]]:
    return take_turns(), take_turns_plainly()


def test_what_is_not_applied_may_be_discarded() -> None:
    for actual, expected in on_ranks(both_turns, 2):
        assert_same(actual, expected)


def scale_own() -> dict[str, Any]:
    """A hook on the parameter scales this rank's gradient, before it is sent."""
    run = Run(DeAR, bucket_mb=1e-4)
    for parameter in run.model.parameters():
        parameter.register_hook(lambda gradient: gradient * 2.0)
    for step in range(5):
        run.optimizer.zero_grad()
        (loss(run.model, step, dist.get_rank()) / 2.0).backward()
        run.sync.step()
    return run.end()


def share_memory() -> dict[str, Any]:
    """All gradients are views of one buffer, as some libraries have them, so that a write to one counts for all."""
    run = Run(DeAR, bucket_mb=1e-4)
    parameters = list(run.model.parameters())
    buffer = torch.zeros(sum(parameter.numel() for parameter in parameters))
    for parameter, part in zip(parameters, buffer.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view(parameter.shape).detach()
    for step in range(5):
        run.optimizer.zero_grad(set_to_none=False)
        loss(run.model, step, dist.get_rank()).backward()
        run.sync.step()
    return run.end()


def read() -> dict[str, Any]:
    error, weights = train(lambda model: [float(parameter.grad.norm()) for parameter in model.parameters()])
    assert error is None
    return weights


@pytest.mark.parametrize("trained", [read, scale_own, share_memory])
def test_a_gradient_may_be_read_changed_by_hooks_and_share_memory(trained: Callable[[], dict[str, Any]]) -> None:
    expected = on_ranks(train_ddp, 2, "sgd", 5)[0]
    for weights in on_ranks(trained, 2):
        assert_same(weights, expected)
