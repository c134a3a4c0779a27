"""The replay of a run with parameter servers, in one process: all weights that it has had, from its log alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipesync.methods.parameter_server.algorithm import Update


def replay(
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], Optimizer],
    loss: Callable[[nn.Module, int, int], Tensor],
    log: Sequence[Update],
) -> list[nn.Module]:
    """Returns the model after each update, the first one before any.

    Args:
        loss: of the model in a rank's step, counted from 0.
    """
    server = copy.deepcopy(model)
    optimizer = make_optimizer(server)
    versions = [copy.deepcopy(server)]
    optimizers = [copy.deepcopy(optimizer.state_dict())]
    for update in log:
        optimizer.zero_grad()
        lr = optimizer.param_groups[0]["lr"]
        total: list[Tensor] = [torch.zeros_like(p) for p in server.parameters()]
        for gradient, weight in zip(update.gradients, update.weights, strict=True):
            learner = ahead(versions[gradient.version], make_optimizer, optimizers[gradient.version], gradient.ahead)
            loss(learner, gradient.step - 1, gradient.rank).backward()
            for one, p in zip(total, learner.parameters(), strict=True):
                assert p.grad is not None
                one.add_(p.grad, alpha=weight)
        for p, one in zip(server.parameters(), total, strict=True):
            p.grad = one / len(update.gradients)
        optimizer.param_groups[0]["lr"] = lr * update.lr_factor
        optimizer.step()
        optimizers.append(copy.deepcopy(optimizer.state_dict()))
        optimizer.param_groups[0]["lr"] = lr
        versions.append(copy.deepcopy(server))
    return versions


def ahead(
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], Optimizer],
    state: dict[str, Any],
    updates: float,
) -> nn.Module:
    """Returns a copy of the model after more updates with gradients of zero, if there has been one; interpolated."""
    model = copy.deepcopy(model)
    if not updates or not state["state"]:
        return model
    optimizer = make_optimizer(model)
    optimizer.load_state_dict(copy.deepcopy(state))

    def step() -> None:
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()

    whole, part = divmod(updates, 1)
    for _ in range(int(whole)):
        step()
    before = [p.detach().clone() for p in model.parameters()]
    step()
    with torch.no_grad():
        for p, one in zip(model.parameters(), before, strict=True):
            p.copy_(one.add(p - one, alpha=part))
    model.zero_grad()
    return model
