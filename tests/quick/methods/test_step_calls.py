"""What a loop may leave out, and what is left of a method that cannot be attached: the same with each method."""

from __future__ import annotations

from collections.abc import Sequence
from threading import enumerate as threads
from typing import Any

import pytest
from torch import Tensor, nn

from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.training.registry import METHODS
from tests.support.harness import assert_raised, on_ranks, raised
from tests.support.models import OPTIMIZERS, assert_same, loss, seeded_mlp, state

NAMES = ("dear", "selsync", "local_sgd", "pipe_sgd", "parameter_server")
SETTINGS = {"parameter_server": {"policy": "sync"}}


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
    return error, before, hooks_of(model), [thread.name for thread in threads() if "pipesync" in thread.name]


@pytest.mark.parametrize("name", NAMES)
def test_what_cannot_be_attached_leaves_no_hook_and_no_thread(name: str) -> None:
    for error, before, after, left in on_ranks(fail_to_attach, 2, name):
        assert_raised(error, "ValueError", "a part of it cannot be made")
        assert before == after
        assert not left
