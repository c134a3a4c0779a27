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
from tests.harness import launch, raised
from tests.models import OPTIMIZERS, average_gradients, loss, seeded_mlp, state, train_ddp

Write = Callable[[nn.Module], object]

#: By what is written after the backward pass: on which ranks.
WRITES: dict[str, tuple[Write, tuple[int, ...]]] = {
    "clip": (lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3), (0, 1)),
    "new tensor": (lambda model: setattr(model[0].weight, "grad", torch.zeros_like(model[0].weight)), (1,)),
    "none": (lambda model: model.zero_grad(), (0,)),
}


def train(write: Write | None, after: str = "", on: tuple[int, ...] = (0, 1)) -> tuple[Any, Any]:
    """Returns the error of a step before which something is written, and the state of the model."""
    model = seeded_mlp()
    optimizer: Optimizer = OPTIMIZERS["sgd"](model)
    sync = DeAR(model, optimizer, bucket_mb=1e-4, timeout_s=10)

    def step() -> None:
        sync.step()
        sync.flush()

    for i in range(4):
        optimizer.zero_grad()
        loss(model, i, dist.get_rank()).backward()
        sync.step()
    optimizer.zero_grad()
    loss(model, 4, dist.get_rank()).backward()
    if after == "after_backward":
        sync.reduce()
    elif after == "clip":
        sync.clip(1e9)
    elif after in ("no_sync", "anew"):
        if after == "anew":  # the new gradients may be where the old ones were in memory
            optimizer.zero_grad()
        with sync.no_sync():
            loss(model, 5, dist.get_rank()).backward()
    if write is not None and dist.get_rank() in on:
        write(model)
    error = raised(step)
    sync.detach()
    return error, state(model)


def write_everywhere() -> dict[str, Any]:
    clip = WRITES["clip"][0]
    later = {after: train(clip, after)[0] for after in ("after_backward", "clip")}
    passes = {after: train(None, after)[0] for after in ("no_sync", "anew")}
    return {"clip": train(clip)[0], **later, **passes}


def write_on_one_rank(what: str) -> tuple[str, str] | None:
    write, on = WRITES[what]
    return train(write, on=on)[0]


def test_a_written_gradient_is_refused() -> None:
    for errors in launch(write_everywhere, 2):
        for error in errors.values():
            assert error is not None
            assert error[0] == "RuntimeError"
            assert "was written to after the backward pass, or by a further one under no_sync()" in error[1]


@pytest.mark.parametrize("what", ["new tensor", "none"])
def test_a_rank_that_alone_writes_is_named(what: str) -> None:
    outcomes = launch(write_on_one_rank, 2, what)
    [writer] = WRITES[what][1]
    assert outcomes[writer] is not None
    assert "was written to after the backward pass" in outcomes[writer][1]
    assert outcomes[1 - writer] is not None
    assert f"Rank {writer} " in outcomes[1 - writer][1]


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
    for actual, expected in launch(both_turns, 2):
        assert all(torch.equal(actual[name], value) for name, value in expected.items())


def scale_own(factor: float) -> dict[str, Any]:
    """A hook on the parameter scales this rank's gradient, before it is sent."""
    model = seeded_mlp()
    sync = DeAR(model, OPTIMIZERS["sgd"](model), bucket_mb=1e-4)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * factor)
    for step in range(5):
        model.zero_grad()
        (loss(model, step, dist.get_rank()) / factor).backward()
        sync.step()
    sync.flush()
    sync.detach()
    return state(model)


def share_memory() -> dict[str, Any]:
    """All gradients are views of one buffer, as some libraries have them, so that a write to one counts for all."""
    model = seeded_mlp()
    sync = DeAR(model, OPTIMIZERS["sgd"](model), bucket_mb=1e-4)
    buffer = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))
    parts = buffer.split([parameter.numel() for parameter in model.parameters()])
    for parameter, part in zip(model.parameters(), parts, strict=True):
        parameter.grad = part.view(parameter.shape).detach()
    for step in range(5):
        model.zero_grad(set_to_none=False)
        loss(model, step, dist.get_rank()).backward()
        sync.step()
    sync.flush()
    sync.detach()
    return state(model)


def look() -> list[bool]:
    """Returns whether DDP's weights are trained by what may look at gradients, and write to them in hooks."""
    expected = train_ddp("sgd", 5)
    looked = train(lambda model: [float(parameter.grad.norm()) for parameter in model.parameters()])
    results = [looked[0] is None, all(torch.equal(looked[1][name], value) for name, value in expected.items())]
    for trained in (scale_own(2.0), share_memory()):
        results.append(all(torch.equal(trained[name], value) for name, value in expected.items()))
    return results


def test_a_gradient_may_be_read_changed_by_hooks_and_share_memory() -> None:
    assert launch(look, 2) == [[True] * 4] * 2
