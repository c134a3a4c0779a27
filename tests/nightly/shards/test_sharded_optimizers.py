"""Optimizers of sharded replicas that need whole parameters, or get more; and running averages of sharded weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import Adafactor, AdamW, Muon, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lightning_pipesync import METHODS, DeAR
from tests.nightly.shards.test_sharded_replicas import (
    REPLICAS,
    SHARDS,
    adamw,
    batch,
    device_mesh,
    model,
    sharded,
    whole,
)
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import raised

STEPS = 4


def muon(module: nn.Module) -> list[Optimizer]:
    """Muon for matrices, whose momentum is that of whole matrices, and AdamW for the rest."""
    matrices = [parameter for parameter in module.parameters() if parameter.dim() == 2]
    rest = [parameter for parameter in module.parameters() if parameter.dim() != 2]
    return [Muon(matrices, lr=0.05), AdamW(rest, lr=1e-2)]


def backward(module: nn.Module, step: int) -> Tensor:
    inputs, targets = batch(dist.get_rank(), step)
    loss: Tensor = (module(inputs) - targets).square().mean()
    loss.backward()
    return loss.detach()


def by_fsdp(averaged: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Trains a replica with FSDP2 alone, whose gradients are those of both replicas if ``averaged``."""
    mesh = device_mesh()
    module = sharded(mesh["shards"])
    optimizers = muon(module)
    for step in range(STEPS):
        backward(module, step)
        for parameter in module.parameters() if averaged else ():
            assert parameter.grad is not None
            gradient = parameter.grad.to_local()  # type: ignore[attr-defined]
            dist.all_reduce(gradient, group=mesh["replicas"].get_group())
            gradient.div_(REPLICAS)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return whole(module), states_of(optimizers)


def by_method(name: str, with_closure: bool = False, **settings: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Trains with a method; returns the weights before they are consolidated."""
    mesh = device_mesh()
    module = sharded(mesh["shards"])
    optimizers = muon(module)
    sync = METHODS[name](module, optimizers, replicas=mesh["replicas"], timeout_s=60, **settings)
    for step in range(STEPS):
        loss = None if with_closure else backward(module, step)
        for optimizer in optimizers:
            if loss is None:

                def closure(step: int = step) -> Tensor:
                    return backward(module, step)

                loss = sync.step(lambda opt=optimizer, closure=closure: opt.step(closure), optimizer=optimizer)
                assert loss is not None
            else:
                sync.step(optimizer=optimizer)
        for optimizer in optimizers:
            optimizer.zero_grad()
    weights = whole(module)
    with sync.given_back():
        states = states_of(optimizers)
    sync.flush()
    sync.detach()
    return weights, states


def states_of(optimizers: list[Optimizer]) -> list[Tensor]:
    """Returns the momentum of whole matrices."""
    return [state["momentum_buffer"].full_tensor() for state in optimizers[0].state.values()]


def average(name: str, with_fsdp: bool = False, **settings: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Trains with a running average that is sharded alike; returns the consolidated weights, and the average."""
    mesh = device_mesh()
    module, averaged = model(), AveragedModel(model(), multi_avg_fn=get_ema_multi_avg_fn(0.5))
    dimensions = mesh if with_fsdp else mesh["shards"]
    fully_shard(module, mesh=dimensions)
    fully_shard(averaged.module, mesh=dimensions)
    optimizer = adamw(module)
    sync = None
    if not with_fsdp:
        sync = METHODS[name](module, optimizer, replicas=mesh["replicas"], timeout_s=60, **settings)
        sync.follow(averaged)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(module, step)
        (sync or optimizer).step()
        averaged.update_parameters(module)
    if sync is not None:
        sync.flush()
        sync.detach()
    return whole(module), whole(averaged)


def average_by_hand() -> list[Tensor]:
    """Trains each replica alone; returns the mean of their running averages."""
    mesh = device_mesh()
    module, averaged = model(), AveragedModel(model(), multi_avg_fn=get_ema_multi_avg_fn(0.5))
    fully_shard(module, mesh=mesh["shards"])
    fully_shard(averaged.module, mesh=mesh["shards"])
    optimizer = adamw(module)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(module, step)
        optimizer.step()
        averaged.update_parameters(module)
    means = whole(averaged)
    for mean in means:
        dist.all_reduce(mean, group=mesh["replicas"].get_group())
        mean.div_(REPLICAS)
    return means


def thaw(with_fsdp: bool) -> list[Tensor]:
    """Trains with DeAR, or FSDP2 on both dimensions; the last layer joins the optimizer later."""
    mesh = device_mesh()
    module = sharded(mesh if with_fsdp else mesh["shards"])
    head = list(module.get_submodule("3").parameters())
    optimizer = AdamW([p for p in module.parameters() if all(p is not frozen for frozen in head)], lr=1e-2)
    for parameter in head:
        parameter.requires_grad_(False)
    sync = None if with_fsdp else DeAR(module, optimizer, replicas=mesh["replicas"], timeout_s=60)
    for step in range(STEPS):
        if step == STEPS // 2:
            for parameter in head:
                parameter.requires_grad_(True)
            optimizer.add_param_group({"params": head})
        optimizer.zero_grad()
        backward(module, step)
        (sync or optimizer).step()
    if sync is not None:
        sync.flush()
        sync.detach()
    return whole(module)


def refuse(method: str, make: Callable[..., Optimizer]) -> str:
    mesh = device_mesh()
    module = sharded(mesh["shards"])
    optimizer = make([parameter for parameter in module.parameters() if parameter.dim() == 2])
    return str(raised(lambda: METHODS[method](module, optimizer, replicas=mesh["replicas"], timeout_s=60)))


#: By what each says, what is refused.
REFUSED: dict[str, tuple[str, Callable[..., Optimizer]]] = {
    "Muon steps on whole matrices, and this method updates shards of them": ("dear", Muon),
    "Muon steps on whole matrices, and this method updates": ("pipe_sgd", Muon),
    "Adafactor is not known to be element-wise": ("selsync", Adafactor),
}

#: By its name, what trains as FSDP2 alone, with the gradients of both replicas or of its own.
WITH_MUON: dict[str, tuple[bool, dict[str, Any]]] = {
    "selsync": (True, {"name": "selsync", "delta": 0.0, "aggregation": "gradients"}),
    "alone": (False, {"name": "local_sgd", "period": 1000}),
    "closure": (False, {"name": "local_sgd", "period": 1000, "with_closure": True}),
}


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    cases: dict[Any, Any] = {says: partial(refuse, *what) for says, what in REFUSED.items()}
    cases |= {name: partial(by_method, **settings) for name, (_, settings) in WITH_MUON.items()}
    cases |= {averaged: partial(by_fsdp, averaged) for averaged in (False, True)}
    cases |= {("dear", with_fsdp): partial(average, "dear", with_fsdp) for with_fsdp in (False, True)}
    cases["local_sgd"] = partial(average, "local_sgd", period=1000)
    cases["by hand"] = average_by_hand
    cases |= {("thaw", with_fsdp): partial(thaw, with_fsdp) for with_fsdp in (False, True)}
    return launch_cases(cases, REPLICAS * SHARDS)


@pytest.mark.parametrize("says", REFUSED)
def test_refused_on_all_ranks(says: str, outcomes: Outcomes) -> None:
    assert all(says in message for message in outcomes[says]), outcomes[says]


@pytest.mark.parametrize("name", WITH_MUON)
def test_muon_steps_on_whole_matrices_as_with_fsdp2_alone(name: str, outcomes: Outcomes) -> None:
    """Bit for bit, and so does its momentum."""
    averaged, _ = WITH_MUON[name]
    for (found, momentum), (expected, of_fsdp) in zip(outcomes[name], outcomes[averaged], strict=True):
        assert all(map(torch.equal, found, expected))
        assert of_fsdp
        assert all(map(torch.equal, momentum, of_fsdp))


def test_running_average_of_dear_is_that_of_fsdp2_on_both_dimensions(outcomes: Outcomes) -> None:
    for found, expected in zip(outcomes["dear", False], outcomes["dear", True], strict=True):
        for ours, theirs in zip(found, expected, strict=True):
            assert all(map(torch.equal, ours, theirs))


def test_running_averages_of_replicas_are_averaged(outcomes: Outcomes) -> None:
    for (_, found), expected in zip(outcomes["local_sgd"], outcomes["by hand"], strict=True):
        assert all(map(torch.equal, found, expected))


def test_layers_that_join_the_optimizer_are_trained_as_with_fsdp2(outcomes: Outcomes) -> None:
    for found, expected in zip(outcomes["thaw", False], outcomes["thaw", True], strict=True):
        assert all(map(torch.equal, found, expected))
