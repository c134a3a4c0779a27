"""What users read from optimizer.state and write to it, where the states are in buckets or on servers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from lightning_pipesync import DeAR, ParameterServer
from tests.support.harness import assert_raised, on_ranks, raised
from tests.support.models import Run, seeded_mlp

METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "dear": (DeAR, {}),
    "dear, sharded": (DeAR, {"update": "sharded"}),
    "servers": (ParameterServer, {"policy": "sync"}),
}
USES: dict[str, Callable[..., Any]] = {
    "len": lambda optimizer, parameter: len(optimizer.state),
    "clear": lambda optimizer, parameter: optimizer.state.clear(),
    "one": lambda optimizer, parameter: optimizer.state[parameter]["momentum_buffer"],
    "loop": lambda optimizer, parameter: [*optimizer.state.values()],
    "set": lambda optimizer, parameter: optimizer.state.update({parameter: {}}),
    "state_dict": lambda optimizer, parameter: optimizer.state_dict(),
    "deepcopy": lambda optimizer, parameter: copy.deepcopy(optimizer),
}


def use_in_training(name: str) -> dict[str, tuple[str, str] | None]:
    """Returns what each use raises, after some steps and after a state was loaded as the error says."""
    method, settings = METHODS[name]
    run = Run(method, "sgd", **settings)
    run.steps(range(3))
    first = next(run.model.parameters())
    errors = {which: raised(partial(use, run.optimizer, first)) for which, use in USES.items()}
    run.optimizer.load_state_dict(run.sync.optimizer_state_dict(run.optimizer))
    assert len(run.optimizer.state) == 4, "what was loaded is here"
    run.step(3)
    errors["after the next step"] = raised(lambda: len(run.optimizer.state))
    run.sync.flush()
    run.sync.return_optimizer_states()
    run.sync.detach()
    assert torch.is_tensor(run.optimizer.state[first]["momentum_buffer"])
    run.optimizer.state.clear()
    assert not run.optimizer.state_dict()["state"]
    return errors


@pytest.mark.parametrize("name", METHODS)
def test_a_use_is_refused_by_a_message_that_names_the_way_out(name: str) -> None:
    """What is loaded that way is trained on, as the habits show."""
    for errors in on_ranks(use_in_training, 2, name):
        for use, error in errors.items():
            words = ("the state of SGD: optimizer.state has nothing of it", "optimizer_state_dict(optimizer)")
            assert error is not None, use
            assert_raised(error, "RuntimeError", *words)


def state_after_weights_were_loaded() -> list[torch.Tensor]:
    run = Run(ParameterServer, "sgd", policy="sync")
    run.step(0)
    run.sync.flush()
    run.model.load_state_dict(seeded_mlp(1).state_dict())
    states = run.sync.optimizer_state_dict()["state"]
    run.sync.detach()
    return [state["momentum_buffer"] for state in states.values()]


def test_servers_keep_the_state_when_only_weights_are_loaded() -> None:
    first, other = on_ranks(state_after_weights_were_loaded, 2)
    assert len(first) == 4
    assert all(map(torch.equal, first, other))
    assert any(moment.any() for moment in first)
