"""What a loop may leave out, and what is left of a method that cannot be attached: the same with each method."""

from __future__ import annotations

from collections.abc import Sequence
from threading import enumerate as threads
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.training.registry import METHODS
from tests.support.harness import assert_raised, on_ranks, raised
from tests.support.lost_ranks import TIMEOUT_S
from tests.support.models import OPTIMIZERS, assert_same, loss, seeded_mlp, state

NAMES = ("dear", "selsync", "local_sgd", "pipe_sgd", "parameter_server")
SETTINGS = {"parameter_server": {"policy": "sync"}}
#: With which the first step updates the weights by its own gradient.
SYNCHRONOUS = {"pipe_sgd": {"staleness": 0}}


def clip_without_reduce(name: str) -> list[dict[str, Tensor]]:
    """Returns the weights after steps in which `clip` reduces the gradient, and after steps that reduce it first."""
    found = []
    for reduces in (False, True):
        model = seeded_mlp()
        optimizer = OPTIMIZERS["sgd"](model)
        method: Any = METHODS[name]
        sync = method(model, optimizer, **SETTINGS.get(name, {}))
        for step in range(3):
            loss(model, step, sync.transport.rank).backward()
            if reduces:
                sync.reduce()
            sync.clip(0.1)
            sync.clip_value(0.05)
            sync.step(lambda optimizer=optimizer: optimizer.step())
            optimizer.zero_grad()
        sync.flush()
        found.append(state(model))
        sync.detach()
    return found


@pytest.mark.parametrize("name", NAMES)
def test_clipping_reduces_the_gradient(name: str) -> None:
    for clipped, reduced in on_ranks(clip_without_reduce, 2, name):
        assert_same(clipped, reduced, name)


def clip_before_unscaling(name: str) -> float:
    """Returns by how much a step changes a weight whose gradient is 1, clipped and unscaled by a loss scaler later."""
    net = nn.Linear(4, 2, bias=False)
    optimizer = SGD(net.parameters(), lr=1.0)
    method: Any = METHODS[name]
    sync = method(net, optimizer, **{**SETTINGS.get(name, {}), **SYNCHRONOUS.get(name, {})})
    before = net.weight.detach().clone()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(net(torch.ones(1, 4)).sum()).backward()
    sync.reduce(scaler=scaler, unscale=False)
    sync.clip(1e9)
    scaler.unscale_(optimizer)
    sync.reduce(scaler=scaler)
    sync.step(lambda: scaler.step(optimizer))
    sync.flush()
    sync.detach()
    return (before - net.weight).abs().max().item()


@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_may_be_clipped_before_it_is_unscaled(name: str) -> None:
    assert on_ranks(clip_before_unscaling, 2, name) == [1.0] * 2


def hooks_of(model: nn.Module) -> list[int]:
    kinds = ["_forward_pre_hooks", "_forward_hooks", "_state_dict_hooks", "_state_dict_pre_hooks"]
    kinds += ["_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"]
    of_parameters = [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]
    return [len(getattr(module, kind)) for module in model.modules() for kind in kinds] + of_parameters


def fail_to_attach(name: str) -> tuple[Any, list[int], list[int], list[str]]:
    method: Any = METHODS[name]

    def attach(self: Any, parameters: Sequence[NamedParameter]) -> None:
        method._attach(self, parameters)
        raise ValueError("a part of it cannot be made")

    model = seeded_mlp()
    optimizer, before = OPTIMIZERS["sgd"](model), hooks_of(model)
    error = raised(lambda: type("Failing", (method,), {"_attach": attach})(model, optimizer))
    loss(model, 0, 0).backward()
    optimizer.step()
    left = [thread for thread in threads() if "pipesync" in thread.name]
    for thread in left:
        thread.join(TIMEOUT_S)  # those that are about to end do so, also on a busy machine
    return error, before, hooks_of(model), [thread.name for thread in left if thread.is_alive()]


@pytest.mark.parametrize("name", NAMES)
def test_what_cannot_be_attached_leaves_no_hook_and_no_thread(name: str) -> None:
    for error, before, after, left in on_ranks(fail_to_attach, 2, name):
        assert_raised(error, "ValueError", "a part of it cannot be made")
        assert before == after
        assert not left
