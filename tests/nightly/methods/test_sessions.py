"""Which method trains which models in Fabric, where ranks reference other wrappers or something is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD

from lightning_pipesync import DeAR
from tests.support.case_table import Outcomes, launch_cases
from tests.support.fabric_runs import launched
from tests.support.harness import on_ranks, raised


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def trained(fabric: Any, model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    fabric.backward(model(torch.ones(2, 4)).square().mean())
    optimizer.step()


def a_refused_optimizer_is_forgotten(fabric: Any) -> None:
    net = layers()
    assert "LBFGS" in (raised(lambda: fabric.setup(net, LBFGS(net.parameters()))) or ("", ""))[1]
    trained(fabric, *fabric.setup(net, SGD(net.parameters(), lr=0.1)))


def a_refused_optimizer_and_a_failed_load_leave_the_training_alone(fabric: Any) -> None:
    net = layers()
    model, optimizer = fabric.setup(net, SGD(net[0].parameters(), lr=0.1))
    assert raised(lambda: fabric.setup_optimizers(LBFGS(net[1].parameters())))
    assert raised(lambda: fabric.load("no such file", {"model": model, "optimizer": optimizer}))
    trained(fabric, model, optimizer)


def a_wrapper_is_held_on_one_rank(fabric: Any) -> None:
    """The same model is set up again, and a submodule beside it; rank 1 references neither wrapper."""
    net = layers()
    held = [fabric.setup(net, SGD(net.parameters(), lr=0.1)), fabric.setup_module(net[0])]
    if fabric.global_rank == 1:
        held.clear()
    model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.1))
    trained(fabric, model, optimizer)
    method = fabric.strategy.method_of(optimizer)
    trained(fabric, *fabric.setup(other := layers(), SGD(other.parameters(), lr=0.1)))
    assert fabric.strategy.method_of(optimizer) is method
    assert [name for name, _ in method._module.named_parameters()] == [name for name, _ in net.named_parameters()]


def buffers_are_consolidated_each_time(fabric: Any) -> Tensor:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model, _ = fabric.setup(net, SGD(net.parameters(), lr=0.1))
    with fabric.strategy.consolidated():
        pass
    torch.manual_seed(fabric.global_rank)
    model(torch.randn(8, 4))
    with fabric.strategy.consolidated():
        return net[1].running_mean.clone()


def closures_of_two_optimizers(fabric: Any) -> None:
    net = layers()
    model, *optimizers = fabric.setup(net, *(SGD(layer.parameters(), lr=0.1) for layer in net))
    for optimizer in optimizers * 2:

        def closure() -> Tensor:
            model.zero_grad()
            loss = model(torch.ones(2, 4)).square().mean()
            fabric.backward(loss)
            return loss

        optimizer.step(closure)


def in_session(name: str, session: Callable[[Any], Any]) -> Any:
    fabric = launched(name)
    result = session(fabric)
    fabric.strategy.teardown()
    return result


def a_refused_method_leaves_the_optimizer_to_the_user() -> None:
    net = nn.Linear(4, 2, bias=False)
    optimizer = SGD(net.parameters(), lr=1.0)
    assert raised(lambda: DeAR(net, optimizer, topology="torus2d", torus_columns=7))
    optimizer.step()


SESSIONS: list[tuple[str, Callable[[Any], Any]]] = [
    ("selsync", a_refused_optimizer_is_forgotten),
    ("dear", a_refused_optimizer_and_a_failed_load_leave_the_training_alone),
    ("selsync", a_wrapper_is_held_on_one_rank),
    ("dear", closures_of_two_optimizers),
]


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    sessions = [*SESSIONS, ("dear", buffers_are_consolidated_each_time)]
    return launch_cases({of.__name__: partial(in_session, name, of) for name, of in sessions}, 2, init=False)


@pytest.mark.parametrize("session", [session.__name__ for _, session in SESSIONS])
def test_sessions_of_fabric(session: str, outcomes: Outcomes) -> None:
    assert outcomes[session] == [None, None]


def test_buffers_are_consolidated_each_time(outcomes: Outcomes) -> None:
    first, second = outcomes[buffers_are_consolidated_each_time.__name__]
    assert torch.equal(first, second)


def test_a_refused_method_leaves_the_optimizer_to_the_user() -> None:
    on_ranks(a_refused_method_leaves_the_optimizer_to_the_user, 2)
