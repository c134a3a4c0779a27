"""What ranks bring along when a method is attached, or load later: what differs is refused on all ranks, by name."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.optim.optimizer as torch_optimizer
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_pipesync import DeAR, LocalSGD, ParameterServer, PipeSGD, SelSync
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import assert_raised, assert_refused, raised
from tests.support.models import OPTIMIZERS, Run, assert_same, loss, seeded_mlp, state

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
#: Those whose ranks have optimizer states of their own, and those whose ranks have the same weights at every step.
OWN_STATES, SAME_WEIGHTS = ("easgd", "diloco", "selsync", "local_sgd"), ("dear", "pipe_sgd", "pipe_sgd, level 2")

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
    """Two of the same classes and learning rates: the conformance suite has others."""
    method, settings = METHODS[name]
    rank = dist.get_rank()

    def attempt(make: Callable[[nn.Module], Optimizer]) -> Outcome:
        def attach() -> None:
            model = seeded_mlp(seed=rank)
            method(model, make(model), **settings).detach()

        return raised(attach)

    return {
        "same": attempt(lambda model: with_groups(model, weight_decay=0.01)),
        "state": attempt(with_state if rank == 0 else OPTIMIZERS["sgd"]),
        "weight_decay of group 1 of SGD: rank 0 has 0.0, rank 1 has 0.01": attempt(
            lambda model: with_groups(model, weight_decay=0.01 * rank)
        ),
        "lr of group 0 of SGD: rank 0 has a tensor of 0.5, rank 1 has a tensor of 1.0": attempt(
            lambda model: SGD(model.parameters(), lr=torch.tensor(0.5 + 0.5 * rank))
        ),
    }


def attach_own_weights(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the weights and buffers of this rank before a method is attached, and after."""
    method, settings = METHODS[name]
    model = seeded_mlp(seed=dist.get_rank(), batch_norm=True)
    for buffer in model.buffers():
        buffer += 1 + dist.get_rank()
    before = state(model)
    method(model, OPTIMIZERS["sgd"](model), **settings).detach()
    return before, state(model)


def flip_a_bit(tensor: Tensor) -> None:
    tensor.view(torch.int32)[0] ^= 1


def load(name: str, what: str, at: int) -> Outcome:
    """Loads something before a step, and returns what is raised until the weights are flushed.

    Rank 1 loads a checkpoint in which a bit of the weights or of a momentum has flipped, or none has; or rank 0 alone
    loads other weights or momenta.
    """
    method, settings = METHODS[name]
    run, rank = Run(method, with_state, **settings, timeout_s=60), dist.get_rank()
    weights, kept = state(run.model), deepcopy(run.optimizer.state_dict())
    if rank == 1 and what == "damaged weights":
        flip_a_bit(weights["2.bias"])
    if rank == 1 and what == "damaged state":
        flip_a_bit(kept["state"][3]["momentum_buffer"])

    def train_on() -> None:
        run.steps(range(at))
        if what == "weights of rank 0" and rank == 0:
            run.model.load_state_dict(state(seeded_mlp(seed=1)))
        elif what == "state of rank 0" and rank == 0:
            run.optimizer.load_state_dict(with_state(seeded_mlp()).state_dict())
        elif "of rank 0" not in what:
            run.model.load_state_dict(weights)
            run.optimizer.load_state_dict(kept)
        run.steps(range(at, 5))
        run.sync.flush()

    outcome = raised(train_on)
    run.sync.detach()
    return outcome


def hooks_on(run: Run) -> list[str]:
    """Returns where hooks are: on modules, parameters, the optimizer, or all optimizers."""
    places: dict[str, Any] = {"all optimizers": torch_optimizer, "the optimizer": run.optimizer}
    places |= {f"module {name!r}": module for name, module in run.model.named_modules()}
    found = [f"{place}: {kind}" for place, one in places.items() for kind, v in vars(one).items() if is_hooks(kind, v)]
    for name, parameter in run.model.named_parameters():
        kinds = [kind for kind in dir(parameter) if "hooks" in kind and is_hooks(kind, getattr(parameter, kind))]
        found += [f"parameter {name}: {kind}" for kind in kinds]
    return found


def is_hooks(name: str, value: Any) -> bool:
    return "hooks" in name and isinstance(value, dict) and bool(value)


def detach_in_training(name: str) -> tuple[list[str], list[str]]:
    """Returns where hooks are while a method is attached, and after it has been detached."""
    method, settings = METHODS[name]
    run = Run(method, OPTIMIZERS["sgd"], **settings)
    run.steps(range(2))
    attached = hooks_on(run)
    run.sync.flush()
    run.sync.detach()
    return attached, hooks_on(run)


def step_directly(name: str) -> Outcome:
    """Returns what a step of the optimizer itself raises, which changes nothing; afterwards it is the user's again."""
    method, settings = METHODS[name]
    run = Run(method, **settings)
    run.step(0)
    run.sync.synchronize()
    before = state(run.model)
    run.backward(1)
    outcome = raised(run.optimizer.step)
    assert_same(state(run.model), before)
    dist.barrier()  # with policies that do not wait, another rank may still be in its step
    run.sync.detach()
    run.optimizer.step()
    return outcome


#: What is loaded, before which step, and what is said to differ: at the first step, or at the next flush.
LOADED: list[tuple[str, int, str | None]] = [
    ("the same", 0, None),
    ("the same", 3, None),
    ("damaged weights", 0, "2.bias"),
    ("damaged state", 0, "SGD's state of 2.bias"),
    ("damaged weights", 3, ""),
    ("weights of rank 0", 0, "0.weight: rank 0 has digest"),
    ("state of rank 0", 3, ""),
]


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    cases: dict[Any, Any] = {name: partial(attach_differently, name) for name in METHODS}
    cases |= {(name, "own weights"): partial(attach_own_weights, name) for name in METHODS}
    cases |= {(name, "detached"): partial(detach_in_training, name) for name in METHODS}
    cases |= {(name, "directly"): partial(step_directly, name) for name in METHODS}
    cases |= {(name, what, at): partial(load, name, what, at) for name in SAME_WEIGHTS for what, at, _ in LOADED}
    return launch_cases(cases, 2)


@pytest.mark.parametrize("name", METHODS)
def test_different_optimizers_are_refused(name: str, outcomes: Outcomes) -> None:
    for outcome in outcomes[name]:
        assert outcome.pop("same") is None
        of_state = outcome.pop("state")
        if name in OWN_STATES:
            assert of_state is None
        else:
            assert_refused({"The ranks differ in SGD's state of 0.weight: rank 0 has digest": of_state})
            assert "rank 1 has none" in of_state[1]
        assert_refused(outcome)


@pytest.mark.parametrize(("what", "at", "differs"), LOADED)
def test_what_ranks_load_differently_is_noticed(what: str, at: int, differs: str | None, outcomes: Outcomes) -> None:
    for name in SAME_WEIGHTS:
        for outcome in outcomes[name, what, at]:
            if differs is None:
                assert outcome is None
            else:
                assert_refused({f"The ranks differ in {differs}": outcome})
                assert "Load the same on all ranks" in outcome[1]


@pytest.mark.parametrize("name", METHODS)
def test_a_step_without_the_method_is_refused(name: str, outcomes: Outcomes) -> None:
    for outcome in outcomes[name, "directly"]:
        assert_raised(outcome, "RuntimeError", "SGD.step() was called directly")


@pytest.mark.parametrize("name", METHODS)
def test_a_method_leaves_no_hook_behind(name: str, outcomes: Outcomes) -> None:
    for attached, detached in outcomes[name, "detached"]:
        assert {place.partition(" ")[0] for place in attached} >= {"all"}
        assert detached == []


@pytest.mark.parametrize("name", METHODS)
def test_all_ranks_begin_with_the_weights_and_buffers_of_the_first(name: str, outcomes: Outcomes) -> None:
    (first, _), (second, _) = outcomes[name, "own weights"]
    assert not any(
        torch.equal(value, second[key]) for key, value in first.items() if key == "0.weight" or "running" in key
    )
    for _, after in outcomes[name, "own weights"]:
        assert_same(after, first)
