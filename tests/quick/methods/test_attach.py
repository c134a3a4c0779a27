"""What ranks bring along when a method is attached, or load later: what differs is refused on all ranks, by name."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_pipesync import DeAR, LocalSGD, ParameterServer, PipeSGD, SelSync
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import assert_refused, raised
from tests.support.models import OPTIMIZERS, Run, loss, seeded_mlp, state

METHODS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "dear": (DeAR, {}),
    "pipe_sgd": (PipeSGD, {}),
    "pipe_sgd, level 2": (PipeSGD, {"pipeline_level": 2}),
    "parameter_server": (ParameterServer, {}),
    "easgd": (ParameterServer, {"policy": "easgd"}),
    "diloco": (ParameterServer, {"policy": "diloco"}),
    "selsync": (SelSync, {}),
    "local_sgd": (LocalSGD, {}),
}
#: Those whose ranks have optimizer states of their own.
OWN_STATES = ("easgd", "diloco", "selsync", "local_sgd")
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


def train(name: str, num_steps: int, before_step: Callable[[int, nn.Module, Optimizer], None]) -> Outcome:
    """Trains with momenta from the start, and returns what is raised until the weights are flushed."""
    method, settings = METHODS[name]
    run = Run(method, with_state, **settings, timeout_s=20)

    def train_on() -> None:
        for step in range(num_steps):
            before_step(step, run.model, run.optimizer)
            run.step(step)
        run.sync.flush()

    outcome = raised(train_on)
    run.sync.detach()
    return outcome


def flip_a_bit(tensor: Tensor) -> None:
    tensor.view(torch.int32)[0] ^= 1


def load_damaged(name: str) -> dict[str, Outcome]:
    """Loads a checkpoint, of which rank 1 gets one bit flipped, before the first step and after the third."""

    def load_at(at: int, damaged: str = "") -> Outcome:
        def load(step: int, model: nn.Module, optimizer: Optimizer) -> None:
            if step == 0:
                saved.update(model=state(model), optimizer=deepcopy(optimizer.state_dict()))
            if step != at:
                return
            if dist.get_rank() == 1 and damaged == "weights":
                flip_a_bit(saved["model"]["2.bias"])
            if dist.get_rank() == 1 and damaged == "state":
                flip_a_bit(saved["optimizer"]["state"][3]["momentum_buffer"])
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])

        saved: dict[str, Any] = {}
        return train(name, 5, load)

    return {
        "none": load_at(0),
        "none, later": load_at(3),
        "weights": load_at(0, "weights"),
        "state": load_at(0, "state"),
        "weights, later": load_at(3, "weights"),
    }


def load_on_rank_0(name: str) -> Outcome:
    """Rank 0 alone loads other weights before the first step."""

    def load(_: int, model: nn.Module, optimizer: Optimizer) -> None:
        if dist.get_rank() == 0:
            model.load_state_dict(state(seeded_mlp(seed=1)))

    return train(name, 1, load)


def load_optimizer_on_rank_0(name: str) -> Outcome:
    """Rank 0 alone loads momenta in the training: at the next step or flush nobody waits for the other one."""

    def load(step: int, model: nn.Module, optimizer: Optimizer) -> None:
        if step == 3 and dist.get_rank() == 0:
            optimizer.load_state_dict(with_state(seeded_mlp()).state_dict())

    return train(name, 6, load)


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    cases: dict[Any, Any] = {("attach", name): partial(attach_differently, name) for name in METHODS}
    for load in (load_damaged, load_on_rank_0, load_optimizer_on_rank_0):
        cases |= {(load, name): partial(load, name) for name in SAME_WEIGHTS}
    return launch_cases(cases, 2)


@pytest.mark.parametrize("name", METHODS)
def test_different_optimizers_are_refused(name: str, outcomes: Outcomes) -> None:
    for outcome in outcomes["attach", name]:
        for kind, words in {
            "class": "the class of the optimizer: rank 0 has torch.optim.sgd.SGD, rank 1 has torch.optim.adamw.AdamW.",
            "lr": "lr of group 0 of SGD: rank 0 has 0.1, rank 1 has 0.2.",
            "field": "weight_decay of group 1 of SGD: rank 0 has 0.0, rank 1 has 0.01.",
            "tensor": "lr of group 0 of SGD: rank 0 has a tensor of 0.5, rank 1 has a tensor of 1.0.",
        }.items():
            assert outcome[kind] == ("ValueError", f"The ranks differ in {words}")
        assert outcome["same"] is None
        if name in OWN_STATES:
            assert outcome["state"] is None
        else:
            assert_refused({"The ranks differ in SGD's state of 0.weight: rank 0 has digest": outcome["state"]})
            assert outcome["state"][1].endswith("rank 1 has none. Load the same on all ranks.")


@pytest.mark.parametrize("name", SAME_WEIGHTS)
def test_a_damaged_checkpoint_is_noticed(name: str, outcomes: Outcomes) -> None:
    """At the first step, or at the next flush."""
    for outcome in outcomes[load_damaged, name]:
        assert outcome["none"] is None
        assert outcome["none, later"] is None
        for kind, what in {"weights": "2.bias", "state": "SGD's state of 2.bias", "weights, later": ""}.items():
            assert_refused({f"The ranks differ in {what}": outcome[kind]})


@pytest.mark.parametrize("name", SAME_WEIGHTS)
def test_what_one_rank_loads_is_noticed(name: str, outcomes: Outcomes) -> None:
    for of_weights, of_state in zip(
        *(outcomes[how, name] for how in (load_on_rank_0, load_optimizer_on_rank_0)), strict=True
    ):
        assert_refused(
            {"The ranks differ in 0.weight: rank 0 has digest": of_weights, "The ranks differ in ": of_state}
        )
        assert of_state[1].endswith("Load the same on all ranks.")
