"""What else plain loops do with sharded models: Muon, running averages, layers that thaw, buffers, states in order."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.support.case_table import Outcomes
from tests.support.shards import (
    RANKS,
    REPLICAS,
    adamw,
    attach,
    backward,
    device_mesh,
    end,
    equal,
    launch_sharded,
    model,
    run,
    sharded,
    whole,
)

STEPS = 4
EXACT = {"delta": 0.0, "aggregation": "gradients"}


def muon(module: nn.Module) -> list[Optimizer]:
    """Muon for matrices, whose momentum is that of whole matrices, and AdamW for the rest."""
    parts = [[p for p in module.parameters() if (p.dim() == 2) == matrices] for matrices in (True, False)]
    return [Muon(parts[0], lr=0.05), AdamW(parts[1], lr=1e-2)]


def states_of(optimizers: list[Optimizer]) -> list[Tensor]:
    """Returns the momentum of whole matrices."""
    return [state["momentum_buffer"].full_tensor() for state in optimizers[0].state.values()]


def by_fsdp(averaged: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Trains a replica with FSDP2 alone, whose gradients are those of both replicas if ``averaged``."""
    mesh = device_mesh()
    module = sharded(mesh["shards"])
    optimizers = muon(module)
    for step in range(STEPS):
        backward(module, step)
        for gradient in [p.grad.to_local() for p in module.parameters()] if averaged else ():  # type: ignore[union-attr]
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
    sync = attach(name, module, optimizers, mesh, **settings)
    for step in range(STEPS):
        loss = None if with_closure else backward(module, step)
        for optimizer in optimizers:
            if loss is None:  # the first one computes it
                closure = partial(backward, module, step)
                loss = sync.step(lambda one=optimizer, closure=closure: one.step(closure), optimizer=optimizer)
                assert loss is not None
            else:
                sync.step(optimizer=optimizer)
        for optimizer in optimizers:
            optimizer.zero_grad()
    weights = whole(module)
    with sync.given_back():
        states = states_of(optimizers)
    end(module, sync)
    return weights, states


def average(name: str | None, **settings: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Trains with a running average that is sharded alike; returns the consolidated weights, and the average.

    Without a method FSDP2 trains along both dimensions.
    """
    mesh = device_mesh()
    module, averaged = model(), AveragedModel(model(), multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for one in (module, averaged.module):
        fully_shard(one, mesh=mesh if name is None else mesh["shards"])
    optimizer = adamw(module)
    sync = None if name is None else attach(name, module, optimizer, mesh, **settings)
    if sync is not None:
        sync.follow(averaged)
    for step in range(STEPS):
        run(module, optimizer, sync, [step])
        averaged.update_parameters(module)
    return end(module, sync), whole(averaged)


def average_by_hand() -> list[Tensor]:
    """Trains each replica alone; returns the mean of their running averages."""
    mesh = device_mesh()
    module, averaged = model(), AveragedModel(model(), multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for one in (module, averaged.module):
        fully_shard(one, mesh=mesh["shards"])
    optimizer = adamw(module)
    for step in range(STEPS):
        run(module, optimizer, None, [step])
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
    sync = None if with_fsdp else attach("dear", module, optimizer, mesh)
    run(module, optimizer, sync, range(2))
    for parameter in head:
        parameter.requires_grad_(True)
    optimizer.add_param_group({"params": head})
    run(module, optimizer, sync, range(2, STEPS))
    return end(module, sync)


class Counting(nn.Module):
    """Has a mean and a number of its own inputs as buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("mean", torch.full((), float(dist.get_rank())))
        self.register_buffer("count", torch.full((), dist.get_rank()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.mean = self.mean * 0.5 + inputs.detach().mean()
        self.count = self.count + 1 + dist.get_rank()
        output: Tensor = self.layer(inputs - self.mean)
        return output

    def seen(self) -> list[float]:
        return [self.mean.item(), self.count.item()]


def consolidate_buffers(name: str, **settings: Any) -> dict[str, list[float]]:
    """Returns this rank's buffers at the beginning, before a flush, within it and after it."""
    module = Counting()
    fully_shard(module, mesh=device_mesh()["shards"])
    optimizer = adamw(module)
    sync = attach(name, module, optimizer, **settings)
    seen = {"begin": module.seen()}
    run(module, optimizer, sync, [0])
    seen["before"] = module.seen()
    sync.flush()
    seen["flushed"] = module.seen()
    sync.resume()
    seen["after"] = module.seen()
    sync.detach()
    return seen


def order_of_states() -> list[int]:
    """Returns the order in which an optimizer that is given back has its states, by the number of the parameter."""
    module = nn.Sequential(nn.Linear(6, 64), nn.Linear(64, 1), nn.Linear(1, 3))  # a rank has no shard of the second
    mesh = device_mesh()["shards"]
    for layer in (*module, module):  # so that the gradients come in another order than the parameters
        fully_shard(layer, mesh=mesh)
    optimizer = adamw(module)
    sync = attach("dear", module, optimizer, fusion="buffer", bucket_mb=1e-4)
    run(module, optimizer, sync, range(2))
    with sync.given_back():
        number_of = {id(parameter): number for number, parameter in enumerate(module.parameters())}
        numbers = [number_of[id(parameter)] for parameter in optimizer.state]
    sync.detach()
    return numbers


def train_alone(with_fsdp: bool, overlap: str) -> list[Tensor]:
    """Returns the weights of a rank that holds a replica alone, which FSDP2 may have divided among this rank only."""
    module = model()
    if with_fsdp:
        mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("replicas", "shards"))
        fully_shard(module, mesh=mesh["shards"])
    optimizer = adamw(module)
    sync = attach("dear", module, optimizer, overlap=overlap)
    run(module, optimizer, sync, range(3))
    return end(module, sync)


#: By name what trains as FSDP2 alone, with the gradients of both replicas or of its own.
WITH_MUON: dict[str, tuple[bool, Any]] = {
    "selsync": (True, partial(by_method, "selsync", **EXACT)),
    "alone": (False, partial(by_method, "local_sgd", period=1000)),
    "closure": (False, partial(by_method, "local_sgd", period=1000, with_closure=True)),
}
BUFFERS = {
    "dear": {},
    "pipe_sgd": {"delay_compensation": "none"},
    "selsync": {"delta": float("inf")},
    "local_sgd": {"period": 2},
}


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    cases: dict[Any, Any] = {name: case for name, (_, case) in WITH_MUON.items()}
    cases |= {("fsdp", averaged): partial(by_fsdp, averaged) for averaged in (False, True)}
    cases |= {("average", name): partial(average, name) for name in ("dear", None)}
    cases["average", "local_sgd"] = partial(average, "local_sgd", period=1000)
    cases["by hand"] = average_by_hand
    cases |= {("thaw", with_fsdp): partial(thaw, with_fsdp) for with_fsdp in (False, True)}
    cases |= {("buffers", name): partial(consolidate_buffers, name, **settings) for name, settings in BUFFERS.items()}
    cases |= {("alone", *both): partial(train_alone, *both) for both in ALONE}
    return launch_sharded({**cases, "order": order_of_states}, RANKS)


ALONE = [(with_fsdp, overlap) for with_fsdp in (False, True) for overlap in ("eager", "none")]


@pytest.mark.parametrize("name", WITH_MUON)
def test_muon_steps_on_whole_matrices_as_with_fsdp2_alone(name: str, outcomes: Outcomes) -> None:
    """Bit for bit, and so does its momentum."""
    for (found, momentum), (expected, of_fsdp) in zip(
        outcomes[name], outcomes["fsdp", WITH_MUON[name][0]], strict=True
    ):
        assert equal(found, expected)
        assert of_fsdp
        assert equal(momentum, of_fsdp)


def test_running_averages(outcomes: Outcomes) -> None:
    """DeAR's is that of FSDP2 on both dimensions; those of replicas that train alone are averaged."""
    for found, expected in zip(outcomes["average", "dear"], outcomes["average", None], strict=True):
        assert all(equal(*both) for both in zip(found, expected, strict=True))
    for (_, averaged), mean in zip(outcomes["average", "local_sgd"], outcomes["by hand"], strict=True):
        assert equal(averaged, mean)


def test_layers_that_join_the_optimizer_are_trained_as_with_fsdp2(outcomes: Outcomes) -> None:
    for found, expected in zip(outcomes["thaw", False], outcomes["thaw", True], strict=True):
        assert equal(found, expected)


@pytest.mark.parametrize("name", BUFFERS)
def test_flush_makes_the_buffers_of_all_ranks_the_same(name: str, outcomes: Outcomes) -> None:
    """They are rank 0's, or with replicas that train alone the mean over all ranks."""
    ranks = outcomes["buffers", name]
    assert all(rank["begin"] == [0.0, 0] for rank in ranks)
    before = [rank["before"] for rank in ranks]
    assert len({mean for mean, _ in before}) == RANKS
    alone = name in ("selsync", "local_sgd")
    mean = sum(mean for mean, _ in before) / RANKS if alone else before[0][0]
    for rank in ranks:
        assert rank["flushed"] == [pytest.approx(mean), before[0][1]]
        assert rank["flushed"] == ranks[0]["flushed"]
        assert rank["after"] == (rank["before"] if alone else ranks[0]["flushed"])


def test_optimizers_have_their_states_in_the_order_of_the_parameters(outcomes: Outcomes) -> None:
    """Also where ranks of a replica have other buckets: their whole tensors are gathered one after the other."""
    assert outcomes["order"] == [list(range(6))] * RANKS


@pytest.mark.parametrize("overlap", ["eager", "none"])
def test_shards_of_one_rank_are_whole(overlap: str, outcomes: Outcomes) -> None:
    """As where hosts have a single rank now, of a script that shards within hosts."""
    for found, expected in zip(outcomes["alone", True, overlap], outcomes["alone", False, overlap], strict=True):
        assert equal(found, expected)
