"""Replicas that are asked to leave, as by SIGTERM: nothing is lost with them, and nobody waits for them."""

from __future__ import annotations

import os
import signal
import time
import warnings
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD
from torch.utils.data import DataLoader

from lightning_pipesync import LocalSGD
from lightning_pipesync.core.faults import notice
from lightning_pipesync.core.faults.lighthouse import Lighthouse
from lightning_pipesync.methods.replicas.sections import Sections
from lightning_pipesync.methods.replicas.training_steps import PAUSES
from tests.nightly.jobs.test_replica_jobs_lost import DILOCO, NESTEROV, center, place
from tests.nightly.jobs.test_replica_jobs_sharded import DATA
from tests.references.lost_rank import simulate
from tests.support.harness import DIED, launch, on_ranks
from tests.support.lost_ranks import wait_for
from tests.support.models import OPTIMIZERS, assert_same, loss, seeded_mlp, state
from tests.support.replica_jobs import TIMEOUT_S, launch_replicas, lighthouse

#: The step in which a replica is asked, from 1 on; that of the next round, if the period is 3; and the last step.
ASKED, FOLLOWING, STEPS = 5, 6, 12


@dataclass(frozen=True)
class Job:
    """A training in which replicas are asked to leave.

    Attributes:
        settings: of local SGD.
        asked: the replicas that are, within step ``ASKED``.
        leaving: by replica the step of its last average, which the simulation is given.
        lost: by replica the step whose average is without it, and without its part of the outer state.
        given: what else the simulation is given.
        patience_s: seconds within which they have to leave.
        asked_at: the step within which they are asked.
        period: between two averages.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    asked: tuple[int, ...] = (1,)
    leaving: dict[int, int] = field(default_factory=lambda: {1: FOLLOWING})
    lost: dict[int, int] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)
    replicas: int = 3
    patience_s: float = TIMEOUT_S
    asked_at: int = ASKED
    period: int = 3
    batch_norm: bool = True


STREAMING = {"overlap_steps": 2, "mixing_factor": 0.3}
JOBS = {
    "FedAvg": Job(),
    "DiLoCo": Job(DILOCO, given=NESTEROV),
    "the first": Job(DILOCO, (0,), {0: FOLLOWING}, given=NESTEROV),
    "of two": Job(DILOCO, given=NESTEROV, replicas=2),
    "two at once": Job(DILOCO, (0, 2), {0: FOLLOWING, 2: FOLLOWING}, given=NESTEROV),
    "all": Job(DILOCO, (0, 1), {0: FOLLOWING, 1: FOLLOWING}, given=NESTEROV, replicas=2),
    "EASGD": Job({"outer_optimizer": "elastic"}, given={"make_outer": center, "elastic": 0.9}),
    "streaming": Job(
        {**DILOCO, **STREAMING}, leaving={1: 8}, given={**NESTEROV, **STREAMING}, period=4, batch_norm=False
    ),
    "too late": Job(DILOCO, leaving={}, lost={1: FOLLOWING}, given=NESTEROV, patience_s=0),
    "nobody comes": Job(DILOCO, leaving={}, lost={1: FOLLOWING}, given=NESTEROV, patience_s=0, asked_at=FOLLOWING),
}


def train(jobs: dict[str, Job], addresses: list[str], folder: Path) -> dict[str, Any]:
    """Trains until this replica has left, or to the end."""
    name, rank = place(jobs, addresses)  # type: ignore[arg-type]
    job = jobs[name]
    notice.LEAVE_S = job.patience_s
    model = seeded_mlp(rank, batch_norm=job.batch_norm)
    optimizer = OPTIMIZERS["sgd"](model)
    sync = LocalSGD(model, optimizer, period=job.period, timeout_s=TIMEOUT_S, **job.settings)
    sync.join()
    sections: list[int] = []
    complete, ask = Sections._complete, Lighthouse.ask

    def count(*args: Any) -> None:
        sections.append(sync.num_steps)
        complete(*args)

    def ask_and_tell(*args: Any) -> Any:
        (folder / f"{name} {rank} asks after {sync.num_steps}").touch()
        return ask(*args)

    Sections._complete, Lighthouse.ask = count, ask_and_tell  # type: ignore[method-assign]
    outcome: dict[str, Any] = {"status": 0, "sections": sections}
    loader = sync.prepare_train_loader(DataLoader(range(1000)))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            for _ in loader:
                i = sync.num_steps
                optimizer.zero_grad()
                loss(model, i, rank).backward()
                if job.asked_at == i + 1 == FOLLOWING and rank not in job.asked:
                    wait_for((folder / f"{name} has left").exists)
                if rank in job.asked and i + 1 == job.asked_at:
                    if not job.patience_s and i + 1 < FOLLOWING:  # the others are at the next round already
                        others = set(range(job.replicas)).difference(job.asked)
                        asks = [folder / f"{name} {one} asks after {FOLLOWING - 1}" for one in others]
                        wait_for(lambda asks=asks: all(path.exists() for path in asks))
                    os.kill(os.getpid(), signal.SIGTERM)
                sync.step()
                if sync.num_steps == STEPS:
                    break
        except SystemExit as error:
            outcome["status"] = error.code
            (folder / f"{name} has left").touch()
    outcome |= {"own": state(model), "steps": sync.num_steps, "replicas": sync.metrics()["replicas"]}
    sync.flush()
    outcome |= {"agreed": state(model), "said": [str(one.message) for one in said], "place": loader.state_dict()}
    sync.detach()
    return outcome


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, list[Any]]:
    number = sum(job.replicas for job in JOBS.values())
    with ExitStack() as stack:
        addresses = [stack.enter_context(lighthouse()) for _ in JOBS]
        left = on_ranks(train, number, JOBS, addresses, folder, timeout_s=240, init=False)
    return {name: [left.pop(0) for _ in range(job.replicas)] for name, job in JOBS.items()}


@pytest.mark.parametrize("name", JOBS)
def test_nothing_is_lost_with_those_that_leave(name: str, outcomes: dict[str, list[Any]]) -> None:
    job, found = JOBS[name], outcomes[name]
    staying = [rank for rank in range(job.replicas) if rank not in job.asked]
    ends = job.leaving.get(job.asked[0], ASKED)
    taken = ends if job.leaving else job.asked_at
    simulated = partial(
        simulate, seeded_mlp(batch_norm=job.batch_norm), OPTIMIZERS["sgd"], loss, world_size=job.replicas, **job.given
    )
    settings = {"period": job.period, "lost": job.lost}
    before = simulated(num_steps=ends, **settings)
    after = simulated(num_steps=STEPS, leaving=job.leaving, **settings) if staying else {}
    for rank in job.asked:
        assert (found[rank]["status"], found[rank]["steps"]) == (143, ends), rank
        assert found[rank]["place"]["num_batches"] == taken, "the batches after it are not taken"
        if taken == ends:  # otherwise the weights are those within a step whose end there was not
            assert_same(found[rank]["own"], state(before[rank]), rank)
        assert_same(found[rank]["agreed"], found[job.asked[0]]["agreed"], rank)
    for rank in staying:
        assert (found[rank]["status"], found[rank]["steps"]) == (0, STEPS)
        assert found[rank]["replicas"] == len(staying)
        assert_same(found[rank]["own"], state(after[rank]), rank)
        assert_same(found[rank]["agreed"], found[staying[0]]["agreed"], rank)


@pytest.mark.parametrize("name", JOBS)
def test_nobody_waits_for_them_or_repeats_an_average(name: str, outcomes: dict[str, list[Any]]) -> None:
    """Had their connections broken, or had they been missing, the others would say that they are lost."""
    job, found = JOBS[name], outcomes[name]
    staying = [rank for rank in range(job.replicas) if rank not in job.asked]
    for rank in staying:
        assert len(set(found[rank]["sections"])) == len(found[rank]["sections"])
    for rank in staying[:1]:
        goodbye, *others = [said for said in found[rank]["said"] if " continue" in said]
        assert not others
        assert goodbye.startswith("Said goodbye to "), goodbye
        assert all(f"replica {one} (host" in goodbye for one in job.asked), goodbye


def listen(folder: Path) -> None:
    """Gets a signal twice, and after a pause once more."""
    notice.SAME_S = 0.2
    one = notice.Notice()
    signal.signal(signal.SIGTERM, before := lambda *_: None)
    one.listen()
    assert signal.getsignal(signal.SIGTERM) is before, "the program's own handler stays"
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    one.listen()
    os.kill(os.getpid(), signal.SIGTERM)
    assert one.deadline is not None
    os.kill(os.getpid(), signal.SIGTERM)  # a launcher passes it on
    (folder / "still there").touch()
    time.sleep(2 * notice.SAME_S)
    os.kill(os.getpid(), signal.SIGTERM)
    (folder / "and again").touch()


def test_another_sigterm_ends_a_process_at_once(tmp_path: Path) -> None:
    assert launch(listen, 1, tmp_path, init=False, may_die=(0,)) == [DIED]
    assert [path.name for path in tmp_path.iterdir()] == ["still there"]


def train_sharded(replica: int) -> dict[str, Any]:
    """Trains replicas of two ranks; the second rank alone of replica 0 is asked to leave."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    model = seeded_mlp(0)
    fully_shard(model, mesh=mesh)
    optimizer = OPTIMIZERS["sgd"](model)
    sync = LocalSGD(model, optimizer, period=3, timeout_s=TIMEOUT_S, **DILOCO)
    sync.join()
    loader = sync.prepare_train_loader(DataLoader(range(DATA.size), DATA.batch_size, shuffle=True), seed=7)  # type: ignore[arg-type]

    status = 0
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            for _ in loader:
                optimizer.zero_grad()
                loss(model, sync.num_steps, 2 * replica + dist.get_rank()).backward()
                if (replica, dist.get_rank(), sync.num_steps + 1) == (0, 1, ASKED):
                    os.kill(os.getpid(), signal.SIGTERM)
                sync.step()
                if sync.num_steps == STEPS:
                    break
        except SystemExit as error:
            status = error.code
    outcome = {"status": status, "steps": sync.num_steps, "said": [str(one.message) for one in said]}
    sync.detach()
    dist.barrier()
    return outcome


def test_all_ranks_of_a_job_leave_after_the_same_step() -> None:
    """Whichever of them is asked."""
    outcomes = launch_replicas(train_sharded, 2, ranks_per_replica=2)
    for outcome in outcomes[:2]:
        assert (outcome["status"], outcome["steps"]) == (143, FOLLOWING)
    for outcome in outcomes[2:]:
        assert (outcome["status"], outcome["steps"]) == (0, STEPS)
    assert any("Said goodbye to replica 0 (host" in said for said in outcomes[2]["said"])


def step_one_of_two(_: int, period: int, patience_s: float) -> list[tuple[Any, int]]:
    """Trains with two optimizers, of which one alone steps; returns by that the status, and the number of its steps."""
    notice.LEAVE_S = patience_s
    outcomes: list[tuple[Any, int]] = []
    for stepping in (0, 1):
        model = seeded_mlp()
        optimizers = [SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2])]
        sync = LocalSGD(model, optimizers, period=period, timeout_s=TIMEOUT_S)
        sync.join()
        status: Any = 0
        try:
            for step in range(STEPS + PAUSES):
                if step == STEPS + 1:
                    sync.leave()
                loss(model, step, 0).backward()
                sync.step(optimizer=optimizers[stepping])
        except SystemExit as error:
            status = error.code
        outcomes.append((status, sync._units[stepping].num_steps))
        sync.detach()
    return outcomes


@pytest.mark.parametrize(("period", "patience_s", "left"), [(3, TIMEOUT_S, STEPS + 3), (1000, 0, STEPS + 2)])
def test_one_leaves_whose_other_optimizer_pauses(period: int, patience_s: float, left: int) -> None:
    """After the round of the one that steps, or at once."""
    [outcomes] = launch_replicas(step_one_of_two, 1, period, patience_s)
    assert outcomes == [(143, left), (143, left)]
