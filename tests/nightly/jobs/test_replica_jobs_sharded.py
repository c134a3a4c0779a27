"""Replicas that are jobs of several ranks, each with a shard of the model: bit for bit the replicas of one job."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_pipesync import LocalSGD
from lightning_pipesync.core.comm.line import Line
from lightning_pipesync.core.comm.transport import Transport
from tests.references.elastic_data import Data, seen
from tests.support.harness import DIED, on_ranks
from tests.support.lost_ranks import die
from tests.support.models import OPTIMIZERS, assert_same, loss, seeded_mlp
from tests.support.replica_jobs import TIMEOUT_S, launch_replicas

STEPS, PERIOD, DIES = 13, 3, 5
#: An epoch is longer than the training.
DATA = Data(240, 2)
SETTINGS: dict[str, dict[str, Any]] = {
    "FedAvg": {},
    "DiLoCo int4": {"outer_optimizer": "nesterov", "compression": "int4"},
    "streaming": {"outer_optimizer": "nesterov", "overlap_steps": 1, "fragments": 2},
}


def train(
    replica: int, settings: dict[str, Any], mesh: DeviceMesh | None = None, lost: int | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[list[int]]]:
    """Returns this rank's shards, its own and the average, and the batches that it had by the loader.

    The processes of replica ``lost`` die before a step.
    """
    in_one_job = mesh is not None
    mesh = mesh or init_device_mesh("cpu", (2,))
    model = seeded_mlp(0)
    fully_shard(model, mesh=mesh["shards"] if in_one_job else mesh)
    optimizer = OPTIMIZERS["sgd"](model)
    sync = LocalSGD(model, optimizer, period=PERIOD, timeout_s=TIMEOUT_S, **settings)
    sync.join()
    data = 2 * replica + mesh.get_local_rank("shards" if in_one_job else None)
    loader = sync.prepare_train_loader(DataLoader(range(DATA.size), DATA.batch_size, shuffle=True), seed=7)  # type: ignore[arg-type]
    batches, seen_here = iter(loader), []
    while sync.num_steps < STEPS:
        if replica == lost and sync.num_steps == DIES:
            die()
        seen_here.append(next(batches).tolist())
        optimizer.zero_grad()
        loss(model, sync.num_steps, data).backward()
        sync.step()
    own = shards_of(model)
    sync.end()
    average = shards_of(model)
    sync.detach()
    dist.barrier()
    return own, average, seen_here


def shards_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.to_local().detach().clone() for name, parameter in model.named_parameters()}


def train_in_one_job(settings: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor], list[list[int]]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    return train(dist.get_rank() // 2, settings, mesh)


def train_alone(
    replica: int, settings: dict[str, Any], lost: int | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[list[int]]]:
    dist.init_process_group("gloo")
    return train(replica, settings, lost=lost)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_same_members_are_the_replicas_of_one_job(name: str) -> None:
    of_jobs = launch_replicas(train_alone, 2, SETTINGS[name], ranks_per_replica=2)
    of_ranks = on_ranks(train_in_one_job, 4, SETTINGS[name])
    for one, other in zip(of_jobs, of_ranks, strict=True):
        assert_same(one[0], other[0], name)
        assert_same(one[1], other[1], name)
        assert one[2] == other[2]


def test_the_others_go_on_without_a_lost_replica() -> None:
    """The first one is lost; what is left are two replicas, each on two ranks."""
    outcomes = launch_replicas(train_alone, 3, {"outer_optimizer": "nesterov"}, 0, ranks_per_replica=2, may_die=(0, 1))
    assert outcomes[:2] == [DIED, DIED]
    for rank in (2, 3):
        (own, average, _), (others, same, _) = outcomes[rank], outcomes[rank + 2]
        assert_same(average, same)
        assert_same(average, {name: (own[name] + others[name]) / 2 for name in own})
    following_round = PERIOD * (DIES // PERIOD + 1)
    expected = seen(DATA, {0: "012345", following_round: "2345"}, 1)
    for rank in range(2, 6):
        assert outcomes[rank][2] == [batch for _, batch in expected[str(rank)]][:STEPS]


def fail_once(owner: Any, name: str) -> None:
    """Has a function's first call fail as on a busy machine, where Gloo drops connections that are being made."""
    function, calls = getattr(owner, name), iter(range(1_000_000))

    def wrapped(self: Any, *args: Any) -> None:
        function(self, *args)
        if next(calls) == 0:
            (self if isinstance(self, Line) else self.shards).end_waits()
            raise RuntimeError("[/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")

    setattr(owner, name, wrapped)


#: What fails on one rank of a replica, and has been made on the other.
CONNECTIONS = {"to the other replicas": (Line, "__init__"), "within the replica": (Transport, "exchange_with")}


def train_where_a_connection_fails(replica: int, connection: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    dist.init_process_group("gloo")
    if (replica, dist.get_rank()) == (1, 1):
        fail_once(*CONNECTIONS[connection])
    own, average, _ = train(replica, SETTINGS["FedAvg"])
    return own, average


@pytest.mark.parametrize("connection", CONNECTIONS)
def test_a_connection_that_one_rank_does_not_get_is_made_again(connection: str) -> None:
    """No rank waits for the timeout, and all train as if nothing had been."""
    outcomes = launch_replicas(train_where_a_connection_fails, 2, connection, ranks_per_replica=2)
    undisturbed = on_ranks(train_in_one_job, 4, SETTINGS["FedAvg"])
    for (own, average), (expected, expected_average, _) in zip(outcomes, undisturbed, strict=True):
        assert_same(own, expected, connection)
        assert_same(average, expected_average, connection)
