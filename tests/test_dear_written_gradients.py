"""What is written to ``p.grad`` after DeAR has sent it would be lost, and is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_pipesync import DeAR
from tests.harness import launch, raised
from tests.models import OPTIMIZERS, loss, seeded_mlp, state, train_ddp

Write = Callable[[nn.Module], object]

#: By what is written after the backward pass: on which ranks.
WRITES: dict[str, tuple[Write, tuple[int, ...]]] = {
    "clip": (lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3), (0, 1)),
    "new tensor": (lambda model: setattr(model[0].weight, "grad", torch.zeros_like(model[0].weight)), (1,)),
    "none": (lambda model: model.zero_grad(), (0,)),
}


def train(write: Write | None, reduces_first: bool = False, on: tuple[int, ...] = (0, 1)) -> tuple[Any, Any]:
    """Returns the error of the step in which something is written, and the state of the model."""
    model = seeded_mlp()
    optimizer: Optimizer = OPTIMIZERS["sgd"](model)
    sync = DeAR(model, optimizer, bucket_mb=1e-4, timeout_s=10)
    for step in range(4):
        optimizer.zero_grad()
        loss(model, step, dist.get_rank()).backward()
        sync.step()
    optimizer.zero_grad()
    loss(model, 4, dist.get_rank()).backward()
    if reduces_first:
        sync.after_backward()
    if write is not None and dist.get_rank() in on:
        write(model)
    error = raised(sync.step)
    if error is None:
        sync.flush()
    sync.detach()
    return error, state(model)


def write_everywhere() -> dict[tuple[str, bool], Any]:
    """A write after the gradient was reduced is the same on all ranks here: a rank learns of it by itself."""
    written = {(what, False): train(write, False, on)[0] for what, (write, on) in WRITES.items()}
    return {**written, ("clip", True): train(WRITES["clip"][0], True)[0]}


def test_a_written_gradient_is_refused_on_all_ranks() -> None:
    for of_rank in launch(write_everywhere, 2):
        for error in of_rank.values():
            assert error is not None
            assert error[0] == "RuntimeError"
            assert "sync.clip" in error[1]
        assert "The gradient of 2.bias was written to" in of_rank["clip", False][1]


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
