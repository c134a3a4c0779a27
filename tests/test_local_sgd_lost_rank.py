"""Local SGD goes on without a rank that is lost in any phase: bit for bit the simulation of the ranks that are left."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer
from torch.utils.data import DataLoader

from lightning_pipesync import LocalSGD
from lightning_pipesync.core.comm.gloo import GlooExchange
from lightning_pipesync.core.comm.messages import Messages
from lightning_pipesync.methods.replicas import lost_ranks
from lightning_pipesync.methods.replicas.fragments import Fragments
from lightning_pipesync.methods.replicas.non_trainable import NonTrainableTensors
from lightning_pipesync.methods.replicas.recovery import Recovery
from lightning_pipesync.methods.replicas.tensors import ReplicatedTensors
from lightning_pipesync.methods.replicas.unit import ReplicaUnit
from tests.harness import DIED, free_port, launch
from tests.lost_ranks import TIMEOUT_S, die, wait_for, watch_processes
from tests.models import OPTIMIZERS, assert_same, loss, seeded_mlp, state
from tests.reference_lost_rank import simulate
from tests.reference_selsync import mean

#: The average in which a rank is lost, from 0 on.
ROUND = 1
#: The section in which it starts, if averages overlap: after the first step and two of the first average.
STARTED = 3


@dataclass(frozen=True)
class Job:
    """A training in which ranks are lost.

    Attributes:
        settings: of local SGD.
        fates: what befalls a rank: "step 4": it dies before that step, from 0 on; "validation": while the weights are
            the consolidated ones; otherwise a key of `FATES`.
        lost: the step from whose average on a lost rank plays no part.
        given: what else the simulation is given; None: there is none.
        batch_norm: whether there are buffers, which are averaged after the weights.
        evaluates: whether the weights are consolidated after the fifth step, in the third section.
        prepares: whether the data is divided anew after that, while the weights are the consolidated ones.
        loads: whether all ranks load other weights before the fifth step.
    """

    settings: dict[str, Any]
    fates: dict[int, str]
    lost: dict[int, int]
    given: dict[str, Any] | None = field(default_factory=dict)
    world_size: int = 3
    batch_norm: bool = True
    num_steps: int = 10
    evaluates: bool = False
    prepares: bool = False
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


def in_average(act: Callable[[], object], folder: Path) -> None:
    when_called(Fragments, "start", ROUND, act)


def when_marked(act: Callable[[], object], folder: Path) -> None:
    """Acts when all others have all data of the marked section, and tell each other so."""
    wait_for(lambda: len(list(folder.iterdir())) == dist.get_world_size() - 1)
    act()


def in_flag(act: Callable[[], object], folder: Path, section: int = ROUND + 1) -> None:
    when_called(Recovery, "_commit", section, partial(when_marked, act, folder))


def under_way(folder: Path) -> None:
    """Dies under the second average when all others have started it."""
    in_average(lambda: when_called(GlooExchange, "_sum_values", 0, partial(when_marked, die, folder)), folder)


def expect_no_groups() -> None:
    """Has this rank wait a moment only when groups are first made, as a rank dies then."""
    regroup, timeouts = Recovery._regroup, iter([2.0])

    def regrouping(self: Recovery, snapshot: Any) -> None:
        self._timeout_s = next(timeouts, TIMEOUT_S)
        regroup(self, snapshot)

    Recovery._regroup = regrouping  # type: ignore[method-assign]


FATES: dict[str, Callable[[Path], object]] = {
    "before the average": partial(in_average, die),
    "sums": partial(in_average, die_in_sum),
    "gather": lambda folder: in_average(partial(die_in_gather, lambda: wait_for((folder / "2").exists)), folder),
    "all data": partial(in_flag, die),
    "flag": partial(in_flag, die_while_sending),
    "states": lambda _: when_called(ReplicaUnit, "_average_states", ROUND, die_in_gather),
    "buffers": lambda _: when_called(NonTrainableTensors, "average", ROUND, die_in_gather),
    "flush": lambda _: when_called(Fragments, "check_consolidation", 0, die_in_gather),
    "loading": lambda _: when_called(ReplicatedTensors, "reset_global_weights", 0, die),
    "new groups": lambda _: when_called(Recovery, "_regroup", 0, die),
    "new shards": lambda _: when_called(lost_ranks, "map_tensors", 0, die_in_sum),
    "under way": under_way,
    "under way, flag": partial(in_flag, die_while_sending, section=STARTED),
}


def join(jobs: dict[str, Job], ports: Sequence[int]) -> tuple[str, int]:
    """Divides the launched ranks into jobs; returns the name of this rank's job and its rank there."""
    first, rank = 0, int(os.environ["RANK"])
    for (name, job), port in zip(jobs.items(), ports, strict=True):
        if rank < first + job.world_size:
            environment = {"RANK": rank - first, "WORLD_SIZE": job.world_size, "MASTER_PORT": port}
            os.environ.update({key: str(value) for key, value in environment.items()})
            dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
            return name, rank - first
        first += job.world_size
    raise AssertionError(f"rank {rank} has no job")


def train(jobs: dict[str, Job], ports: Sequence[int], folder: Path) -> dict[str, Any]:
    """Trains with ranks that are lost; returns the weights, and what was said."""
    watch_processes()
    name, rank = join(jobs, ports)
    job, folder = jobs[name], folder / name
    folder.mkdir(exist_ok=True)
    model = seeded_mlp(batch_norm=job.batch_norm)
    optimizer = OPTIMIZERS["sgd"](model)
    settings = {"period": job.period, "on_lost_rank": "continue", "timeout_s": TIMEOUT_S, **job.settings}
    sync = LocalSGD(model, optimizer, **settings)
    phase = job.fates.get(rank, "")
    commits: list[int] = []
    commit = Recovery._commit

    def counted(self: Recovery) -> None:
        commits.append(1)
        commit(self)

    Recovery._commit = counted  # type: ignore[method-assign]
    if "new groups" in job.fates.values():
        expect_no_groups()
    if phase in FATES:
        FATES[phase](folder)
    else:
        section = STARTED if job.settings.get("overlap_steps") else ROUND + 1
        when_called(Recovery, "_commit", section, lambda: (folder / str(rank)).touch())
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
                if job.prepares:
                    loader = sync.prepare_train_loader(DataLoader(range(24)))
                    assert len(list(loader)) == 24 // (job.world_size - len(job.fates)), "divided among those left"
                sync.resume()
            if (i + 1) % job.period == 0:
                ends.append(state(model))
        own = state(model)
        sync.flush()
    consolidated = state(model)
    sync.resume()
    resumed = state(model)
    total = torch.ones(1)
    dist.all_reduce(total)  # the user's own
    samples = [int(x) for x in sync.prepare_train_loader(DataLoader(range(24)))]
    outcome = {
        "own": own,
        "consolidated": consolidated,
        "resumed": resumed,
        "ends": ends,
        "evaluated": evaluated,
        "ranks": sync.metrics()["ranks"],
        "total": total.item(),
        "samples": samples,
        "said": [str(one.message) for one in said if "Lost" in str(one.message)],
        "commits": len(commits),
    }
    sync.detach()
    return outcome


def run(jobs: dict[str, Job], folder: Path) -> dict[str, dict[int, dict[str, Any]]]:
    """Runs jobs, and compares the ranks that are left with the simulation; returns their outcomes by job and rank."""
    world_size = sum(job.world_size for job in jobs.values())
    places = [(name, rank) for name, job in jobs.items() for rank in range(job.world_size)]
    lost = tuple(index for index, (name, rank) in enumerate(places) if rank in jobs[name].fates)
    ports = [free_port() for _ in jobs]
    outcomes = launch(train, world_size, jobs, ports, folder, timeout_s=240, init=False, may_die=lost)
    left: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in jobs}
    for (name, rank), outcome in zip(places, outcomes, strict=True):
        if rank in jobs[name].fates:
            assert outcome == DIED, f"{name}: the fate of rank {rank} has not fired"
        else:
            left[name][rank] = outcome
    for name, job in jobs.items():
        check(name, job, left[name])
    return left


def check(name: str, job: Job, left: dict[int, dict[str, Any]]) -> None:
    said = " ".join(left[0]["said"])
    for rank in job.fates:
        assert f"rank {rank} (host " in said
    for rank, outcome in left.items():
        assert outcome["ranks"] == outcome["total"] == len(left)
        assert bool(outcome["said"]) == (rank == 0)
        assert_same(outcome["evaluated"], left[0]["evaluated"], (name, rank))
        assert_same(outcome["consolidated"], left[0]["consolidated"], (name, rank))
        assert_same(outcome["resumed"], outcome["own"], (name, rank))
        if job.settings.get("outer_optimizer") != "elastic" and not job.settings.get("overlap_steps"):
            assert_same(outcome["ends"][-1], left[0]["ends"][-1], (name, rank))
            assert_same(mean_of([one["own"] for one in left.values()]), outcome["consolidated"], (name, rank))
    assert sorted(x for outcome in left.values() for x in outcome["samples"]) == list(range(24)), "divided anew"
    if job.given is None:
        return
    replicas = simulate(
        seeded_mlp(batch_norm=job.batch_norm),
        OPTIMIZERS["sgd"],
        loss,
        world_size=job.world_size,
        num_steps=job.num_steps,
        period=job.period,
        lost=job.lost,
        **job.given,
    )
    for rank, outcome in left.items():
        assert_same(outcome["own"], state(replicas[rank]), (name, rank))


def mean_of(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {
        name: mean([each[name] for each in states]) if value.is_floating_point() else value
        for name, value in states[0].items()
    }


def nesterov(parameters: list[Tensor], _: int) -> Optimizer:
    return SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def outer_adam(parameters: list[Tensor], _: int) -> Optimizer:
    return Adam(parameters, lr=0.01)


def center(parameters: list[Tensor], ranks: int) -> Optimizer:
    return SGD(parameters, lr=ranks * (0.9 / ranks))


DILOCO, NESTEROV = {"outer_optimizer": "nesterov"}, {"make_outer": nesterov}


def test_goes_on_without_a_rank_that_dies(tmp_path: Path) -> None:
    """The average in which it dies is without it, unless all others have all data of it."""
    jobs = {
        "step 4": Job(DILOCO, {1: "step 4"}, {1: 6}, NESTEROV),
        "before the average": Job(DILOCO, {2: "before the average"}, {2: 6}, NESTEROV),
        "sums": Job(DILOCO, {1: "sums"}, {1: 6}, NESTEROV),
        "gather": Job(DILOCO, {1: "gather"}, {1: 6}, NESTEROV, batch_norm=False),
        "all data": Job(DILOCO, {1: "all data"}, {1: 9}, NESTEROV),
        "flag": Job(DILOCO, {1: "flag"}, {1: 9}, NESTEROV),
    }
    left = run(jobs, tmp_path)
    # Rank 2 had all data, and has undone the average that rank 0 had not.
    assert left["gather"][2]["commits"] == left["gather"][0]["commits"] + 1


def test_each_algorithm_goes_on_twice(tmp_path: Path) -> None:
    """Two ranks of four are lost, one after the other; the outer state of their shards starts at zero."""
    fates, lost = {3: "sums", 1: "step 7"}, {3: 6, 1: 9}
    settings: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "FedAvg": ({}, {}),
        "a share": ({"participation": 0.5}, {"participation": 0.5}),
        "outer Adam": ({"outer_optimizer": "adam", "outer_lr": 0.01}, {"make_outer": outer_adam}),
        "EASGD": ({"outer_optimizer": "elastic"}, {"make_outer": center, "elastic": 0.9}),
    }
    jobs = {name: Job(each, fates, lost, given, world_size=4) for name, (each, given) in settings.items()}
    run(jobs, tmp_path)


def test_further_phases(tmp_path: Path) -> None:
    """The buffers' average, a flush, optimizer states, an average under way, weights that were loaded."""
    streaming = {"overlap_steps": 2, "mixing_factor": 0.3}
    phases = ["under way", "under way, flag"]
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
        for phase in phases
    }
    jobs = {
        "buffers": Job(DILOCO, {1: "buffers"}, {1: 6}, NESTEROV),
        "flush": Job(DILOCO, {1: "flush"}, {1: 6}, NESTEROV, evaluates=True),
        "validation": Job(DILOCO, {1: "validation"}, {1: 6}, NESTEROV, evaluates=True, prepares=True),
        "flush, flag": Job(DILOCO, {1: "flag"}, {1: 6}, NESTEROV, evaluates=True),
        "states": Job({"average_optimizer_states": True}, {1: "states"}, {1: 6}, {"average_states": True}),
        "alone": Job({}, {1: "step 4"}, {1: 6}, world_size=2),
        **streamed,
        "loading": Job(DILOCO, {1: "loading"}, {}, None, loads=True),
        "int8": Job({**DILOCO, "compression": "int8"}, {1: "sums"}, {}, None),
    }
    run(jobs, tmp_path)


def test_ranks_that_are_lost_at_once_or_while_groups_are_made(tmp_path: Path) -> None:
    jobs = {
        "two at once": Job(DILOCO, {1: "sums", 2: "sums"}, {1: 6, 2: 6}, NESTEROV, world_size=4),
        "new groups": Job(DILOCO, {1: "sums", 2: "new groups"}, {1: 6, 2: 6}, NESTEROV, world_size=4),
        "new shards": Job(DILOCO, {1: "sums", 2: "new shards"}, {1: 6, 2: 6}, NESTEROV, world_size=4),
    }
    run(jobs, tmp_path)
