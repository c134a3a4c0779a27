"""What else plain loops do with sharded models: buffers, states in one order, evaluation between steps."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_pipesync import METHODS
from tests.nightly.shards.test_sharded_replicas import REPLICAS, SHARDS, adamw, batch, device_mesh, whole
from tests.support.case_table import Outcomes, launch_cases

RANKS = REPLICAS * SHARDS
KINDS, OVERLAPS = ("whole", "sharded"), ("eager", "none")

#: By its name a method and its settings.
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "dear": ("dear", {}),
    "pipe_sgd": ("pipe_sgd", {"delay_compensation": "none"}),
    "selsync": ("selsync", {"delta": float("inf")}),
    "local_sgd": ("local_sgd", {"period": 2}),
}


class Counting(nn.Module):
    """Has a mean and a number of its own inputs as buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("mean", torch.full((), float(dist.get_rank())))
        self.register_buffer("count", torch.full((), dist.get_rank()))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.mean = self.mean * 0.5 + inputs.detach().mean()
            self.count = self.count + 1 + dist.get_rank()
        output: Tensor = self.layer(inputs - self.mean)
        return output


def attach(name: str, module: nn.Module, optimizer: Any) -> Any:
    method, settings = SETTINGS[name]
    return METHODS[method](module, optimizer, timeout_s=60, **settings)


def step(module: nn.Module, optimizer: Any, sync: Any, number: int) -> None:
    inputs, targets = batch(dist.get_rank(), number)
    optimizer.zero_grad()
    (module(inputs) - targets).square().mean().backward()
    sync.step()


def consolidate_buffers(name: str) -> dict[str, list[Any]]:
    """Returns this rank's buffers at the beginning, before a flush, within it and after it."""
    module = Counting()
    fully_shard(module, mesh=device_mesh()["shards"])
    optimizer = adamw(module)
    sync = attach(name, module, optimizer)
    seen = {"begin": [module.mean.item(), module.count.item()]}
    step(module, optimizer, sync, 0)
    seen["before"] = [module.mean.item(), module.count.item()]
    sync.flush()
    seen["flushed"] = [module.mean.item(), module.count.item()]
    sync.resume()
    seen["after"] = [module.mean.item(), module.count.item()]
    sync.detach()
    return seen


def order_of_states() -> list[int]:
    """Returns the order in which an optimizer that is given back has its states, by the number of the parameter."""
    module = nn.Sequential(nn.Linear(6, 64), nn.Linear(64, 1), nn.Linear(1, 3))  # a rank has no shard of the second
    mesh = device_mesh()["shards"]
    for layer in (*module, module):  # so that the gradients come in another order than the parameters
        fully_shard(layer, mesh=mesh)
    optimizer = adamw(module)
    sync = METHODS["dear"](module, optimizer, timeout_s=60, fusion="buffer", bucket_mb=1e-4)
    for number in range(2):
        step(module, optimizer, sync, number)
    with sync.given_back():
        number_of = {id(parameter): number for number, parameter in enumerate(module.parameters())}
        numbers = [number_of[id(parameter)] for parameter in optimizer.state]
    sync.detach()
    return numbers


def train_alone(sharded: bool, overlap: str) -> list[Tensor]:
    """Returns the weights of a rank that holds a replica alone, which FSDP2 may have divided among this rank only."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    if sharded:
        mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("replicas", "shards"))
        fully_shard(module, mesh=mesh["shards"])
    optimizer = adamw(module)
    sync = METHODS["dear"](module, optimizer, timeout_s=60, overlap=overlap)
    for number in range(3):
        step(module, optimizer, sync, number)
    sync.flush()
    weights = whole(module)
    sync.detach()
    return weights


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    cases: dict[str, Any] = {name: partial(consolidate_buffers, name) for name in SETTINGS}
    cases |= {f"{kind} {way}": partial(train_alone, kind == "sharded", way) for kind in KINDS for way in OVERLAPS}
    return launch_cases({**cases, "order": order_of_states}, RANKS)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_shards_of_one_rank_are_whole(overlap: str, outcomes: Outcomes) -> None:
    """As where hosts have a single rank now, of a script that shards within hosts."""
    for sharded, expected in zip(outcomes[f"sharded {overlap}"], outcomes[f"whole {overlap}"], strict=True):
        assert all(map(torch.equal, sharded, expected))


def test_optimizers_have_their_states_in_the_order_of_the_parameters(outcomes: Outcomes) -> None:
    """Also where ranks of a replica have other buckets: their whole tensors are gathered one after the other."""
    assert outcomes["order"] == [list(range(6))] * RANKS


@pytest.mark.parametrize("name", SETTINGS)
def test_flush_makes_the_buffers_of_all_ranks_the_same(name: str, outcomes: Outcomes) -> None:
    """They are rank 0's, or with replicas that train alone the mean over all ranks."""
    ranks = outcomes[name]
    assert all(rank["begin"] == [0.0, 0] for rank in ranks)
    before = [rank["before"] for rank in ranks]
    assert len({mean for mean, _ in before}) == RANKS
    alone = name in ("selsync", "local_sgd")
    mean = sum(mean for mean, _ in before) / RANKS if alone else before[0][0]
    for rank in ranks:
        assert rank["flushed"] == [pytest.approx(mean), before[0][1]]
        assert rank["flushed"] == ranks[0]["flushed"]
        assert rank["after"] == (rank["before"] if alone else ranks[0]["flushed"])
