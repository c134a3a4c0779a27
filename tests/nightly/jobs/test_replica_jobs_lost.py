"""Replicas that are jobs of their own go on without those that die, in any phase: bit for bit the simulation."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer
from torch.utils.data import DataLoader

from lightning_pipesync import LocalSGD
from lightning_pipesync.core.comm.gloo import GlooExchange
from lightning_pipesync.core.comm.line import Line
from lightning_pipesync.core.comm.messages import Messages
from lightning_pipesync.methods.replicas import regrouping
from lightning_pipesync.methods.replicas.fragments import Fragments
from lightning_pipesync.methods.replicas.jobs import ElasticReplicaMethod
from lightning_pipesync.methods.replicas.membership import Membership
from lightning_pipesync.methods.replicas.non_trainable import NonTrainableTensors
from lightning_pipesync.methods.replicas.tensors import ReplicatedTensors
from lightning_pipesync.methods.replicas.unit import ReplicaUnit
from tests.references.lost_rank import simulate
from tests.references.selsync import average
from tests.support.harness import DIED, launch, raised
from tests.support.lost_ranks import die, wait_for
from tests.support.models import OPTIMIZERS, assert_same, loss, seeded_mlp, state
from tests.support.replica_jobs import TIMEOUT_S, become_replica, lighthouse

#: The average in which a replica is lost, from 0 on.
ROUND = 1
#: The section in which it starts: after that of the first step; if averages overlap, the first has had two.
SECTION, STARTED = ROUND + 1, 3


@dataclass(frozen=True)
class Job:
    """A training in which replicas are lost.

    Attributes:
        settings: of local SGD.
        fates: what befalls a replica: "step 4": it dies before that step, from 0 on; "validation": while the weights
            are the consolidated ones; otherwise a key of `FATES`.
        lost: the step from whose average on a lost replica plays no part.
        given: what else the simulation is given; None: there is none.
        batch_norm: whether there are buffers, which are averaged after the weights.
        evaluates: whether the weights are consolidated after the fifth step.
        loads: whether all replicas load other weights before the fifth step.
    """

    settings: dict[str, Any]
    fates: dict[int, str]
    lost: dict[int, int]
    given: dict[str, Any] | None = field(default_factory=dict)
    replicas: int = 3
    batch_norm: bool = True
    num_steps: int = 10
    evaluates: bool = False
    loads: bool = False
    period: int = 3


def when_called(owner: Any, name: str, number: int, act: Callable[[], object]) -> None:
    """Has `act` called before the call of a function with this number, from 0 on."""
    function, calls = getattr(owner, name), iter(range(1_000_000))

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            act()
        return function(*args, **kwargs)

    setattr(owner, name, wrapped)


def die_in_sum() -> None:
    when_called(GlooExchange, "_sum_values", 0, die)


def die_in_gather(arrived: Callable[[], object] = lambda: time.sleep(0.5)) -> None:
    """Dies when one of the others has all data of the next all-reduce, and the other has not."""
    when_called(GlooExchange, "_gather_slices", 0, partial(die_while_sending, arrived))


def die_while_sending(arrived: Callable[[], object] = lambda: time.sleep(0.5)) -> None:
    """Dies when all peers but the one before this rank, to which it sends last, have got its next messages.

    `arrived` returns when these have arrived, which the system alone has when it takes them.
    """
    start = Messages.start_sending
    works: list[dist.Work] = []

    def sending(self: Messages, tensor: Tensor, peer: int) -> Any:
        if peer == (self.rank - 1) % self.world_size:
            for work in works:
                work.wait(timedelta(seconds=TIMEOUT_S))
            arrived()
            die()
        works.append(start(self, tensor, peer))
        return works[-1]

    Messages.start_sending = sending  # type: ignore[method-assign]


def in_average(act: Callable[[], object], folder: Path, others: int) -> None:
    when_called(Fragments, "start", ROUND, act)


def when_marked(act: Callable[[], object], folder: Path, others: int) -> None:
    """Acts when all others have all data of the marked section, and tell each other so."""
    wait_for(lambda: len(list(folder.iterdir())) == others)
    act()


def in_flag(act: Callable[[], object], folder: Path, others: int, section: int = SECTION) -> None:
    when_called(Membership, "commit", section, partial(when_marked, act, folder, others))


def under_way(folder: Path, others: int) -> None:
    """Dies under the second average when all others have started it."""
    waits = partial(when_marked, die, folder, others)
    in_average(lambda: when_called(GlooExchange, "_sum_values", 0, waits), folder, others)


def in_gather(folder: Path, others: int) -> None:
    in_average(partial(die_in_gather, lambda: wait_for((folder / "2").exists)), folder, others)


#: By the phase, what lets this process die in it; called with the folder of marks, and the number of the others.
FATES: dict[str, Callable[[Path, int], object]] = {
    "before the average": partial(in_average, die),
    "sums": partial(in_average, die_in_sum),
    "gather": in_gather,
    "all data": partial(in_flag, die),
    "flag": partial(in_flag, die_while_sending),
    "states": lambda *_: when_called(ReplicaUnit, "_average_states", ROUND, die_in_gather),
    "buffers": lambda *_: when_called(NonTrainableTensors, "average", ROUND, die_in_gather),
    "loading": lambda *_: when_called(ReplicatedTensors, "reset_global_weights", 0, die),
    "meeting": lambda *_: when_called(Line, "_meet", 0, die),
    "new groups": lambda *_: when_called(ElasticReplicaMethod, "regroup", 0, die),
    "new shards": lambda *_: when_called(regrouping, "resharded", 0, die_in_sum),
    "under way": under_way,
    "under way, flag": partial(in_flag, die_while_sending, section=STARTED),
}


def place(jobs: dict[str, Job], addresses: list[str]) -> tuple[str, int]:
    """Divides the launched processes into the replicas of jobs; returns the job's name and the replica's number."""
    first, process = 0, int(os.environ["RANK"])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    for (name, job), address in zip(jobs.items(), addresses, strict=True):
        if process < first + job.replicas:
            become_replica(address, process - first, job.replicas)
            return name, process - first
        first += job.replicas
    raise AssertionError(f"process {process} has no job")


def train(jobs: dict[str, Job], addresses: list[str], folder: Path) -> dict[str, Any]:
    """Trains with replicas that are lost; returns the weights, and what was said."""
    name, rank = place(jobs, addresses)
    job, folder = jobs[name], folder / name
    folder.mkdir(exist_ok=True)
    model = seeded_mlp(rank, batch_norm=job.batch_norm)
    optimizer = OPTIMIZERS["sgd"](model)
    sync = LocalSGD(model, optimizer, **{"period": job.period, "timeout_s": TIMEOUT_S, **job.settings})
    sync.join()
    phase = job.fates.get(rank, "")
    if phase in FATES:
        FATES[phase](folder, job.replicas - 1)
    else:
        section = STARTED if job.settings.get("overlap_steps") else SECTION
        when_called(Membership, "commit", section, lambda: (folder / str(rank)).touch())
    ends, evaluated = [], {}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for i in range(job.num_steps):
            if phase == f"step {i}":
                die()
            if job.loads and i == 4:
                model.load_state_dict(seeded_mlp(1, batch_norm=job.batch_norm).state_dict())
            optimizer.zero_grad()
            loss(model, i, rank).backward()
            sync.step()
            if job.evaluates and i == 4:
                sync.flush()
                evaluated = state(model)
                if phase == "validation":
                    die()
                sync.resume()
            if (i + 1) % job.period == 0:
                ends.append(state(model))
    own = state(model)
    sync.flush()
    agreed = state(model)
    sync.resume()
    samples = [int(x) for x in sync.prepare_train_loader(DataLoader(range(24)))]
    outcome = {
        "own": own,
        "agreed": agreed,
        "ends": ends,
        "evaluated": evaluated,
        "replicas": sync.metrics()["replicas"],
        "samples": samples,
        "said": [str(one.message) for one in said if " continue" in str(one.message)],
    }
    sync.detach()
    return outcome


def run(jobs: dict[str, Job], folder: Path) -> None:
    """Runs jobs, each with a lighthouse of its own, and compares the replicas that are left with the simulation."""
    places = [(name, rank) for name, job in jobs.items() for rank in range(job.replicas)]
    lost = tuple(index for index, (name, rank) in enumerate(places) if rank in jobs[name].fates)
    with ExitStack() as stack:
        addresses = [stack.enter_context(lighthouse()) for _ in jobs]
        outcomes = launch(train, len(places), jobs, addresses, folder, timeout_s=240, init=False, may_die=lost)
    left: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in jobs}
    for (name, rank), outcome in zip(places, outcomes, strict=True):
        if rank in jobs[name].fates:
            assert outcome == DIED, f"{name}: the fate of replica {rank} has not fired"
        else:
            left[name][rank] = outcome
    problems = [str(raised(partial(check, name, job, left[name]))) for name, job in jobs.items()]
    assert set(problems) == {"None"}, "\n".join(problems)


def check(name: str, job: Job, left: dict[int, dict[str, Any]]) -> None:
    first = left[min(left)]
    said = " ".join(first["said"])
    for rank in job.fates:
        assert f"replica {rank} (host " in said, (name, said)
    for rank, outcome in left.items():
        assert outcome["replicas"] == len(left), (name, rank)
        assert bool(outcome["said"]) == (rank == min(left)), (name, rank, outcome["said"])
        assert_same(outcome["evaluated"], first["evaluated"], (name, rank))
        assert_same(outcome["agreed"], first["agreed"], (name, rank))
        if job.settings.get("outer_optimizer") != "elastic" and not job.settings.get("overlap_steps"):
            assert_same(outcome["ends"][-1], first["agreed"], (name, rank))
    assert sorted(x for outcome in left.values() for x in outcome["samples"]) == list(range(24)), "divided anew"
    if job.given is None:
        return
    replicas = simulate(
        seeded_mlp(batch_norm=job.batch_norm),
        OPTIMIZERS["sgd"],
        loss,
        world_size=job.replicas,
        num_steps=job.num_steps,
        period=job.period,
        lost=job.lost,
        **job.given,
    )
    for rank, outcome in left.items():
        assert_same(outcome["own"], state(replicas[rank]), (name, rank))


def nesterov(parameters: list[Tensor], _: int) -> Optimizer:
    return SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def outer_adam(parameters: list[Tensor], _: int) -> Optimizer:
    return Adam(parameters, lr=0.01)


def center(parameters: list[Tensor], ranks: int) -> Optimizer:
    return SGD(parameters, lr=ranks * (0.9 / ranks))


DILOCO, NESTEROV = {"outer_optimizer": "nesterov"}, {"make_outer": nesterov}


def test_phases(tmp_path: Path) -> None:
    """The average in which one dies is without it, unless all others have all data of it."""
    streaming = {"overlap_steps": 2, "mixing_factor": 0.3}
    streamed = {
        phase: Job(
            {**DILOCO, **streaming},
            {1: phase},
            {1: 8},
            {**NESTEROV, **streaming, "dropped": [8]},
            batch_norm=False,
            num_steps=15,
            period=4,
        )
        for phase in ("under way", "under way, flag")
    }
    jobs = {
        "step 4": Job(DILOCO, {1: "step 4"}, {1: 6}, NESTEROV),
        "before the average": Job(DILOCO, {2: "before the average"}, {2: 6}, NESTEROV),
        "sums": Job(DILOCO, {1: "sums"}, {1: 6}, NESTEROV),
        "the first replica, sums": Job(DILOCO, {0: "sums"}, {0: 6}, NESTEROV),
        "gather": Job(DILOCO, {1: "gather"}, {1: 6}, NESTEROV, batch_norm=False),
        "all data": Job(DILOCO, {1: "all data"}, {1: 9}, NESTEROV),
        "the first replica, all data": Job(DILOCO, {0: "all data"}, {0: 9}, NESTEROV),
        "flag": Job(DILOCO, {1: "flag"}, {1: 9}, NESTEROV),
        "buffers": Job(DILOCO, {1: "buffers"}, {1: 6}, NESTEROV),
        "validation": Job(DILOCO, {1: "validation"}, {1: 6}, NESTEROV, evaluates=True),
        "states": Job({"average_optimizer_states": True}, {1: "states"}, {1: 6}, {"average_states": True}),
        "alone": Job({}, {1: "step 4"}, {1: 6}, replicas=2),
        **streamed,
        "loading": Job(DILOCO, {1: "loading"}, {}, None, loads=True),
        "int8": Job({**DILOCO, "compression": "int8"}, {1: "sums"}, {}, None),
    }
    run(jobs, tmp_path)
    assert (tmp_path / "gather" / "2").exists(), "it had all data, and has undone the average that another had not"


def test_several_losses(tmp_path: Path) -> None:
    """Two of four are lost, in turn, at once, or while those that are left make a group; of each algorithm.

    The outer state of their shards starts at zero.
    """
    fates, lost = {3: "sums", 1: "step 7"}, {3: 6, 1: 9}
    settings: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "FedAvg": ({}, {}),
        "a share": ({"participation": 0.5}, {"participation": 0.5}),
        "outer Adam": ({"outer_optimizer": "adam", "outer_lr": 0.01}, {"make_outer": outer_adam}),
        "EASGD": ({"outer_optimizer": "elastic"}, {"make_outer": center, "elastic": 0.9}),
    }
    jobs = {name: Job(each, fates, lost, given, replicas=4) for name, (each, given) in settings.items()}
    for phase in ("sums", "meeting", "new groups", "new shards"):  # in the first, both at once
        jobs[f"sums, {phase}"] = Job(DILOCO, {1: "sums", 2: phase}, {1: 6, 2: 6}, NESTEROV, replicas=4)
    run(jobs, tmp_path)


def train_to_the_end(address: str, folder: Path) -> dict[str, Tensor]:
    """Trains for four steps, and ends; replica 1 dies when all others have all data of the last average."""
    rank = int(os.environ["RANK"])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    become_replica(address, rank, 3)
    model = seeded_mlp(rank, batch_norm=True)
    optimizer = OPTIMIZERS["sgd"](model)
    sync = LocalSGD(model, optimizer, period=3, timeout_s=TIMEOUT_S, **DILOCO)
    sync.join()
    for i in range(4):
        optimizer.zero_grad()
        loss(model, i, rank).backward()
        sync.step()
    if rank == 1:
        when_called(Membership, "commit", 0, partial(when_marked, die, folder, 2))
    else:
        when_called(Membership, "commit", 0, (folder / str(rank)).touch)
    sync.end()
    last = state(model)
    sync.detach()
    return last


def test_a_loss_within_the_last_average_leaves_it_in_the_weights(tmp_path: Path) -> None:
    with lighthouse() as address:
        of_0, of_1, of_2 = launch(train_to_the_end, 3, address, tmp_path, init=False, may_die=(1,))
    assert of_1 == DIED
    replicas = simulate(
        seeded_mlp(batch_norm=True),
        OPTIMIZERS["sgd"],
        loss,
        world_size=3,
        num_steps=4,
        period=3,
        lost={},
        **NESTEROV,
    )
    average([list(replica.parameters()) for replica in replicas.values()])
    average([list(replica.buffers()) for replica in replicas.values()])
    for last in (of_0, of_2):
        assert_same(last, state(replicas[0]))
