"""What ranks bring along when a method is attached, or load later: what differs is refused on all ranks, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Optimizer

from lightning_pipesync import DeAR, LocalSGD, ParameterServer, PipeSGD, SelSync
from tests.harness import launch, raised
from tests.models import OPTIMIZERS, loss, seeded_mlp, state

METHODS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "dear": (DeAR, {}),
    "pipe_sgd": (PipeSGD, {}),
    "pipe_sgd, level 2": (PipeSGD, {"pipeline_level": 2}),
    "parameter_server": (ParameterServer, {}),
    "easgd": (ParameterServer, {"policy": "easgd"}),
    "selsync": (SelSync, {}),
    "local_sgd": (LocalSGD, {}),
}
#: Those whose ranks have optimizer states of their own.
OWN_STATES = ("easgd", "selsync", "local_sgd")
#: Those whose ranks have the same weights at every step.
SAME_WEIGHTS = ("dear", "pipe_sgd", "pipe_sgd, level 2")

Outcome = tuple[str, str] | None


def with_groups(model: nn.Module, **second: Any) -> Optimizer:
    [first, *others] = model.parameters()
    return SGD([{"params": [first]}, {"params": others, **second}], lr=0.1, momentum=0.9)


def with_state(model: nn.Module) -> Optimizer:
    optimizer = OPTIMIZERS["sgd"](model)
    before = state(model)
    loss(model, 0, rank=0).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.load_state_dict(before)
    return optimizer


def attach_differently(name: str) -> dict[str, Outcome]:
    method, settings = METHODS[name]
    rank = dist.get_rank()

    def attempt(make: Callable[[nn.Module], Optimizer]) -> Outcome:
        def attach() -> None:
            model = seeded_mlp(seed=rank)
            method(model, make(model), **settings).detach()

        return raised(attach)

    return {
        "class": attempt(OPTIMIZERS["adamw" if rank else "sgd"]),
        "lr": attempt(lambda model: SGD(model.parameters(), lr=0.1 + 0.1 * rank)),
        "field": attempt(lambda model: with_groups(model, weight_decay=0.01 * rank)),
        "tensor": attempt(lambda model: SGD(model.parameters(), lr=torch.tensor(0.5 + 0.5 * rank))),
        "state": attempt(with_state if rank == 0 else OPTIMIZERS["sgd"]),
        "same": attempt(lambda model: with_groups(model, weight_decay=0.01)),
    }


@pytest.mark.parametrize("name", METHODS)
def test_different_optimizers_are_refused(name: str) -> None:
    for outcome in launch(attach_differently, 2, name):
        assert outcome["class"] == (
            "ValueError",
            "The ranks differ in the class of the optimizer: rank 0 has torch.optim.sgd.SGD, rank 1 has "
            "torch.optim.adamw.AdamW.",
        )
        for kind, words in {
            "lr": "lr of group 0 of SGD: rank 0 has 0.1, rank 1 has 0.2.",
            "field": "weight_decay of group 1 of SGD: rank 0 has 0.0, rank 1 has 0.01.",
            "tensor": "lr of group 0 of SGD: rank 0 has a tensor of 0.5, rank 1 has a tensor of 1.0.",
        }.items():
            assert outcome[kind] == ("ValueError", f"The ranks differ in {words}")
        assert outcome["same"] is None
        if name in OWN_STATES:
            assert outcome["state"] is None
        else:
            assert outcome["state"] is not None
            assert outcome["state"][0] == "ValueError"
            assert "The ranks differ in SGD's state of 0.weight: rank 0 has digest" in outcome["state"][1]
            assert "rank 1 has none" in outcome["state"][1]
            assert outcome["state"][1].endswith("Load the same on all ranks.")


def load_damaged(name: str, path: Path) -> dict[str, Outcome]:
    """Loads a checkpoint, of which rank 1 gets one bit flipped, before the first step and after the third."""
    method, settings = METHODS[name]

    def train(damaged: str | None, at: int) -> None:
        model = seeded_mlp()
        optimizer = with_state(model)
        saved = {"model": state(model), "optimizer": optimizer.state_dict()}
        sync = method(model, optimizer, **settings, timeout_s=20)
        try:
            for step in range(5):
                if step == at:
                    if dist.get_rank() == 1 and damaged == "weights":
                        saved["model"]["2.bias"].view(torch.int32)[0] ^= 1
                    if dist.get_rank() == 1 and damaged == "state":
                        saved["optimizer"]["state"][3]["momentum_buffer"].view(torch.int32)[0] ^= 1
                    model.load_state_dict(saved["model"])
                    optimizer.load_state_dict(saved["optimizer"])
                optimizer.zero_grad()
                loss(model, step, dist.get_rank()).backward()
                sync.step()
            sync.flush()
        finally:
            sync.detach()

    return {
        "none": raised(lambda: train(None, at=0)),
        "none, later": raised(lambda: train(None, at=3)),
        "weights": raised(lambda: train("weights", at=0)),
        "state": raised(lambda: train("state", at=0)),
        "weights, later": raised(lambda: train("weights", at=3)),
    }


@pytest.mark.parametrize("name", SAME_WEIGHTS)
def test_a_damaged_checkpoint_is_noticed(name: str, tmp_path: Path) -> None:
    """At the first step, or at the next flush."""
    for outcome in launch(load_damaged, 2, name, tmp_path):
        assert outcome["none"] is None
        assert outcome["none, later"] is None
        for kind, what in {"weights": "2.bias", "state": "SGD's state of 2.bias", "weights, later": ""}.items():
            assert outcome[kind] is not None, kind
            assert outcome[kind][0] == "ValueError", outcome[kind]
            assert f"The ranks differ in {what}" in outcome[kind][1]


def load_on_rank_0(name: str) -> Outcome:
    method, settings = METHODS[name]
    model = seeded_mlp()
    sync = method(model, OPTIMIZERS["sgd"](model), **settings, timeout_s=20)
    if dist.get_rank() == 0:
        model.load_state_dict(state(seeded_mlp(seed=1)))
    loss(model, 0, dist.get_rank()).backward()
    outcome = raised(sync.step)
    sync.detach()
    return outcome


@pytest.mark.parametrize("name", SAME_WEIGHTS)
def test_weights_that_one_rank_loads_are_noticed(name: str) -> None:
    for outcome in launch(load_on_rank_0, 2, name):
        assert outcome is not None
        assert "The ranks differ in 0.weight: rank 0 has digest" in outcome[1]


def load_optimizer_on_rank_0(name: str) -> Outcome:
    method, settings = METHODS[name]
    model = seeded_mlp()
    optimizer = OPTIMIZERS["sgd"](model)
    sync = method(model, optimizer, **settings, timeout_s=20)

    def train() -> None:
        for step in range(6):
            if step == 3 and dist.get_rank() == 0:
                optimizer.load_state_dict(with_state(seeded_mlp()).state_dict())
            optimizer.zero_grad()
            loss(model, step, dist.get_rank()).backward()
            sync.step()
        sync.flush()

    outcome = raised(train)
    sync.detach()
    return outcome


@pytest.mark.parametrize("name", SAME_WEIGHTS)
def test_a_state_that_one_rank_loads_in_a_training_is_noticed(name: str) -> None:
    """At the next step or flush: nobody waits for the other one."""
    for outcome in launch(load_optimizer_on_rank_0, 2, name):
        assert outcome is not None
        assert outcome[0] == "ValueError", outcome
        assert "The ranks differ in " in outcome[1]
        assert outcome[1].endswith("Load the same on all ranks.")
