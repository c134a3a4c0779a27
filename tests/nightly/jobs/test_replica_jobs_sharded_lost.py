"""Replicas of several ranks of which one dies within a round: the others go on, bit for bit as the simulation."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_pipesync import LocalSGD
from lightning_pipesync.methods.replicas.jobs import ElasticReplicaMethod
from lightning_pipesync.methods.replicas.membership import Membership
from tests.nightly.jobs.test_replica_jobs_lost import FATES, SECTION, when_called
from tests.nightly.jobs.test_replica_jobs_sharded import shards_of
from tests.references.lost_rank import simulate
from tests.support.harness import DIED, free_port, launch, raised
from tests.support.lost_ranks import die
from tests.support.models import OPTIMIZERS, assert_same, loss, seeded_mlp
from tests.support.replica_jobs import TIMEOUT_S, become_replica, lighthouse, wait_for

REPLICAS, SHARDS, PERIOD, STEPS = 3, 2, 3, 12
#: The replica of which a rank dies; and the step before which the others wait until it has come, in a hand-over.
VICTIM, MEETS = 1, 4


@dataclass(frozen=True)
class Job:
    """A training in which a ``rank`` of replica ``VICTIM`` dies: a key of ``FATES``, or as it gets the others' state.

    ``lost`` is what the simulation is told.
    """

    rank: int
    fate: str
    lost: dict[int, int] = field(default_factory=dict)

    @property
    def comes(self) -> bool:
        return self.fate == "handover"


JOBS = {
    "the first rank, in an average": Job(0, "sums", {VICTIM: 6}),
    "another rank, in an average": Job(1, "sums", {VICTIM: 6}),
    "another rank, as it has all data": Job(1, "all data", {VICTIM: 9}),
    "another rank, as its replica comes": Job(1, "handover", {VICTIM: PERIOD}),
}


def train(addresses: list[str], ports: list[list[int]], folder: Path) -> dict[str, Any]:
    job_number, process = divmod(int(os.environ["RANK"]), REPLICAS * SHARDS)
    replica, rank = divmod(process, SHARDS)
    job = list(JOBS.values())[job_number]
    folder = folder / str(job_number)
    folder.mkdir(exist_ok=True)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(SHARDS), "MASTER_PORT": str(ports[job_number][replica])}
    become_replica(addresses[job_number], replica, REPLICAS - job.comes)
    dist.init_process_group("gloo")
    model = seeded_mlp(replica)
    fully_shard(model, mesh=init_device_mesh("cpu", (SHARDS,)))
    if job.comes and replica == VICTIM:
        wait_for(folder / "they train")
    sync = LocalSGD(model, optimizer := OPTIMIZERS["sgd"](model), period=PERIOD, timeout_s=TIMEOUT_S)
    dies = (replica, rank) == (VICTIM, job.rank)
    if job.comes and replica == VICTIM:
        (folder / "it is there").touch()  # so the others wait for it in their next round
        if dies:
            when_called(ElasticReplicaMethod, "_take_over", 0, die)

    def run() -> None:
        sync.join()
        if dies:
            FATES[job.fate](folder, REPLICAS * SHARDS - 1)
        else:
            when_called(Membership, "commit", SECTION, lambda: (folder / str(process)).touch())
        while sync.num_steps < STEPS:
            if job.comes and sync.num_steps == MEETS:
                (folder / "they train").touch()
                wait_for(folder / "it is there")
            optimizer.zero_grad()
            loss(model, sync.num_steps, process).backward()
            sync.step()

    outcome = {"raised": raised(run), "own": shards_of(model), "replicas": sync.metrics()["replicas"]}
    sync.detach()
    return outcome


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, list[list[Any]]]:
    """By job the outcomes of the ranks of each replica."""
    with ExitStack() as stack:
        addresses = [stack.enter_context(lighthouse()) for _ in JOBS]
        ports = [[free_port() for _ in range(REPLICAS)] for _ in JOBS]
        dying = tuple((n * REPLICAS + VICTIM) * SHARDS + job.rank for n, job in enumerate(JOBS.values()))
        number = len(JOBS) * REPLICAS * SHARDS
        found = launch(train, number, addresses, ports, folder, timeout_s=240, init=False, may_die=dying)
    of_replicas = [found[first : first + SHARDS] for first in range(0, number, SHARDS)]
    return {name: of_replicas[n * REPLICAS : (n + 1) * REPLICAS] for n, name in enumerate(JOBS)}


def loss_of_replica(model: nn.Module, step: int, replica: int) -> Tensor:
    return (loss(model, step, SHARDS * replica) + loss(model, step, SHARDS * replica + 1)) / SHARDS


@pytest.mark.parametrize("name", JOBS)
def test_the_others_go_on(name: str, outcomes: dict[str, list[list[Any]]]) -> None:
    job, found = JOBS[name], outcomes[name]
    assert found[VICTIM][job.rank] == DIED, "the fate has not fired"
    assert found[VICTIM][1 - job.rank]["raised"] is not None, "it has not trained on with a part of the model"
    replicas = simulate(
        seeded_mlp(),
        OPTIMIZERS["sgd"],
        loss_of_replica,
        world_size=REPLICAS,
        num_steps=STEPS,
        period=PERIOD,
        lost=job.lost,
    )
    for replica in (0, 2):
        for rank, outcome in enumerate(found[replica]):
            assert (outcome["raised"], outcome["replicas"]) == (None, 2), (replica, rank)
            shards = {key: each.detach().chunk(SHARDS)[rank] for key, each in replicas[replica].named_parameters()}
            assert_same(outcome["own"], shards, (replica, rank))
