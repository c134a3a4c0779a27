"""What users read from optimizer.state and write to it, where the states are in buckets or on servers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_pipesync import DeAR, ParameterServer
from tests.support.harness import on_ranks, raised
from tests.support.models import loss, seeded_mlp

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


def clear_one_moment(state: dict[str, Any]) -> dict[str, Any]:
    state["state"][0]["momentum_buffer"].zero_()
    return state


def train(name: str | None) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Trains as DDP with None; after three steps each use is tried, and a moment is cleared as the error says."""
    model = seeded_mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    errors: dict[str, Any] = {}
    if name is None:
        forward, sync = DistributedDataParallel(model), None
    else:
        method, settings = METHODS[name]
        forward, sync = model, method(model, optimizer, **settings)
    for step in range(5):
        optimizer.zero_grad()
        loss(forward, step, torch.distributed.get_rank()).backward()
        (optimizer if sync is None else sync).step()
        if step == 2 and sync is None:
            optimizer.state[next(model.parameters())]["momentum_buffer"].zero_()
        elif step == 2:
            first = next(model.parameters())
            errors = {which: raised(partial(use, optimizer, first)) for which, use in USES.items()}
            optimizer.load_state_dict(clear_one_moment(sync.optimizer_state_dict(optimizer)))
            assert len(optimizer.state) == 4, "what was loaded is here"
        elif step == 3 and sync is not None:
            errors["after the next step"] = raised(lambda: len(optimizer.state))
    if sync is not None:
        sync.flush()
        sync.return_optimizer_states()
        sync.detach()
        assert torch.is_tensor(optimizer.state[next(model.parameters())]["momentum_buffer"])
        optimizer.state.clear()
        assert not optimizer.state_dict()["state"]
    return [parameter.detach().clone() for parameter in model.parameters()], errors


@pytest.mark.parametrize("name", METHODS)
def test_a_use_is_refused_by_a_message_whose_way_out_is_ddp(name: str) -> None:
    expected = on_ranks(train, 2, None)
    for (weights, errors), (of_ddp, _) in zip(on_ranks(train, 2, name), expected, strict=True):
        assert all(map(torch.equal, weights, of_ddp))
        for use, error in errors.items():
            assert error is not None, use
            assert error[0] == "RuntimeError"
            assert "the state of SGD: optimizer.state has nothing of it" in error[1], use
            assert "optimizer_state_dict(optimizer)" in error[1]


def state_after_weights_were_loaded() -> list[torch.Tensor]:
    model = seeded_mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sync = ParameterServer(model, optimizer, policy="sync")
    loss(model, 0, torch.distributed.get_rank()).backward()
    sync.step()
    sync.flush()
    model.load_state_dict(seeded_mlp(1).state_dict())
    states = sync.optimizer_state_dict()["state"]
    sync.detach()
    return [state["momentum_buffer"] for state in states.values()]


def test_servers_keep_the_state_when_only_weights_are_loaded() -> None:
    first, other = on_ranks(state_after_weights_were_loaded, 2)
    assert len(first) == 4
    assert all(map(torch.equal, first, other))
    assert any(moment.any() for moment in first)
