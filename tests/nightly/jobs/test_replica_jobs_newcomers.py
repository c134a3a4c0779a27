"""Replicas that are jobs of their own, and come, or come back: bit for bit the simulation of those who take part."""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from lightning_pipesync import LocalSGD
from lightning_pipesync.methods.replicas.jobs import ElasticReplicaMethod
from lightning_pipesync.methods.replicas.membership import Membership
from lightning_pipesync.methods.replicas.sections import Sections
from tests.nightly.jobs.test_replica_jobs_lost import DILOCO, NESTEROV, die_while_sending, when_called
from tests.references.lost_rank import simulate
from tests.support.harness import DIED, assert_raised, launch, on_ranks, raised
from tests.support.lost_ranks import die, freeze, stopped, wait_for, wake, write
from tests.support.models import OPTIMIZERS, assert_same, loss, seeded_mlp, state
from tests.support.replica_jobs import TIMEOUT_S, become_replica, lighthouse

#: The step before which one is lost, from 0 on; and how many samples the data has.
LOST_AT, SAMPLES = 4, 4000


@dataclass(frozen=True)
class Job:
    """A training to which replicas come.

    Attributes:
        settings: of local SGD.
        given: what else the simulation is given.
        replicas: with which training begins.
        comes: the names of those that come.
        fates: what befalls a replica before its fifth step: "dies", "freezes" until the others have gone on, or "hangs"
            so long.
        fate: what befalls those that come: they "die asking", "die in the handover", "die before the rest"; or they are
            refused, with "another period" or "another model".
        period: between two averages.
        timeout_s: after which a replica that does nothing counts as lost.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)
    replicas: int = 3
    comes: tuple[int, ...] = ()
    fates: dict[int, str] = field(default_factory=dict)
    fate: str = ""
    period: int = 3
    timeout_s: float = TIMEOUT_S

    @property
    def names(self) -> list[int]:
        """The replicas of its processes."""
        return [*range(self.replicas), *self.comes]

    @property
    def dying(self) -> list[int]:
        """Indices in `names` of the processes that die."""
        come = range(self.replicas, len(self.names)) if self.fate.startswith("die") else ()
        return [*(rank for rank, fate in self.fates.items() if fate == "dies"), *come]

    @property
    def staying(self) -> list[int]:
        """Indices in `names` of the processes that train in the end."""
        come = [] if self.fate else range(self.replicas, len(self.names))
        return [*(rank for rank in range(self.replicas) if rank not in self.fates), *come]


class Counter:
    """Has a state, as a scheduler does."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Training:
    """What a process of a job does, whose number is its index in :attr:`Job.names`."""

    def __init__(self, job: Job, number: int, folder: Path) -> None:
        self.job, self.number, self.folder = job, number, folder
        self.rank, self.comes = job.names[number], number >= job.replicas
        self.leads = number == job.staying[0]

    def run(self) -> dict[str, Any]:
        job = self.job
        if self.comes:
            self._await_turn()
        differs = job.fate if self.comes else ""
        self.model = seeded_mlp(0 if self.number == 0 else 7, batch_norm=differs != "another model")
        self.optimizer = OPTIMIZERS["sgd"](self.model)
        settings = {"period": job.period + (differs == "another period"), "timeout_s": job.timeout_s, **job.settings}
        self.sync = LocalSGD(self.model, self.optimizer, **settings)
        outcome: dict[str, Any] = {"samples": [], "replicas": []}
        outcome["raised"] = raised(partial(self._train, outcome))
        (self.folder / f"{self.number} has ended").touch()
        outcome |= {"own": state(self.model), "steps": self.sync.num_steps}
        self.sync.detach()
        return outcome

    def _await_turn(self) -> None:
        """Lets this process come once the others train, and one is lost; and die then, if that is its fate."""
        wait_for(lambda: all((self.folder / f"{number} has begun").exists() for number in range(self.job.replicas)))
        for rank, fate in self.job.fates.items():
            if fate == "dies":
                wait_for(lambda rank=rank: stopped(self.folder / f"{rank} dies"))
        write(self.folder / f"{self.number} came", os.getpid())
        dies = {
            "die asking": (Sections, "_take_in"),
            "die in the handover": (ElasticReplicaMethod, "_take_over"),
            "die before the rest": (ElasticReplicaMethod, "receive_rest"),
        }
        if self.job.fate in dies:
            when_called(*dies[self.job.fate], 0, die)
        elif self.job.fate == "die in the flag":  # one of the others has taken it in, and the other has not
            when_called(Membership, "commit", 0, die_while_sending)

    def _train(self, outcome: dict[str, Any]) -> None:
        sync, counter = self.sync, Counter()
        sync.join()
        (self.folder / f"{self.number} has begun").touch()
        sync.hand_over(counter=counter)
        outcome |= {"began": sync.num_steps, "counted": counter.count}
        batches = iter(sync.prepare_train_loader(DataLoader(range(SAMPLES), shuffle=True), seed=1))
        while not self._has_ended():
            self._befall()
            outcome["samples"].append(int(next(batches)))
            self.optimizer.zero_grad()
            loss(self.model, sync.num_steps, self.rank).backward()
            sync.step()
            counter.count += 1
            outcome["replicas"].append(int(sync.metrics()["replicas"]))
            if self.leads:
                self._end_in_time(outcome["replicas"])

    def _befall(self) -> None:
        fate = self.job.fates.get(self.number) if self.sync.num_steps == LOST_AT else None
        if fate == "dies":
            write(self.folder / f"{self.number} dies", os.getpid())
            die()
        elif fate == "freezes":
            freeze(self.folder)
        elif fate == "hangs":
            wait_for((self.folder / "without it").exists, TIMEOUT_S)
        elif self.sync.num_steps == LOST_AT and "freezes" in self.job.fates.values():
            wait_for(lambda: stopped(self.folder / "frozen"))

    def _end_in_time(self, replicas: list[int]) -> None:
        """Decides when all end: two rounds after all has happened that is to happen."""
        job, present = self.job, replicas[-1] == len(self.job.staying)
        if not present or (self.folder / "end").exists() or len(replicas) <= LOST_AT + job.period:
            return
        if set(job.fates.values()) & {"freezes", "hangs"} and not (self.folder / "without it").exists():
            (self.folder / "without it").touch()
            if "freezes" in job.fates.values():
                wake(self.folder)
        late = {number for number, fate in job.fates.items() if fate != "dies"}
        late |= set(range(job.replicas, len(job.names))) - set(job.staying) - set(job.dying)
        gone = all(stopped(self.folder / f"{number} came") for number in job.dying if number >= job.replicas)
        gone &= all((self.folder / f"{number} has ended").exists() for number in late)
        if gone:
            rounds = self.sync.num_steps // job.period + 3
            write(self.folder / "end", rounds * job.period)

    def _has_ended(self) -> bool:
        end = self.folder / "end"
        return end.exists() and self.sync.num_steps >= int(end.read_text())


def train(jobs: dict[str, Job], addresses: list[str], folder: Path) -> dict[str, Any]:
    process = int(os.environ["RANK"])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    for (name, job), address in zip(jobs.items(), addresses, strict=True):
        if process < len(job.names):
            become_replica(address, job.names[process], job.replicas)
            (folder / name).mkdir(exist_ok=True)
            return Training(job, process, folder / name).run()
        process -= len(job.names)
    raise AssertionError("this process has no job")


def run(jobs: dict[str, Job], folder: Path) -> dict[str, list[Any]]:
    """Runs jobs, each with a lighthouse of its own; returns the outcomes of their processes."""
    places = [(name, number) for name, job in jobs.items() for number in range(len(job.names))]
    may_die = tuple(index for index, (name, number) in enumerate(places) if number in jobs[name].dying)
    with ExitStack() as stack:
        addresses = [stack.enter_context(lighthouse()) for _ in jobs]
        outcomes = launch(train, len(places), jobs, addresses, folder, timeout_s=240, init=False, may_die=may_die)
    for index in may_die:
        assert outcomes[index] == DIED, f"{places[index]}: the fate has not fired"
    by_job: dict[str, list[Any]] = {name: [] for name in jobs}
    for (name, _), outcome in zip(places, outcomes, strict=True):
        by_job[name].append(outcome)
    problems = [str(raised(partial(check, name, job, by_job[name]))) for name, job in jobs.items()]
    assert set(problems) == {"None"}, "\n".join(problems)
    return by_job


def check(name: str, job: Job, outcomes: list[Any]) -> None:
    """Compares those that train in the end with the simulation."""
    staying = {number: outcomes[number] for number in job.staying}
    steps = outcomes[job.staying[0]]["steps"]
    back = {job.names[number]: one["began"] for number, one in staying.items() if number >= job.replicas}
    for number, one in staying.items():
        assert one["raised"] is None, (name, number, one["raised"])
        assert one["steps"] == steps, (name, number)
        assert one["began"] == one["counted"] == back.get(job.names[number], 0) * (number >= job.replicas), (
            name,
            number,
        )
        assert one["replicas"][-1] == len(job.staying), (name, number)
    samples = [sample for one in staying.values() for sample in one["samples"]]
    assert len(set(samples)) == len(samples), f"{name}: some got the same samples"
    lost = dict.fromkeys(job.fates, 2 * job.period if job.period <= LOST_AT else job.period)
    replicas = simulate(
        seeded_mlp(batch_norm=True),
        OPTIMIZERS["sgd"],
        loss,
        world_size=job.replicas,
        num_steps=steps,
        period=job.period,
        lost=lost,
        back=back,
        **job.given,
    )
    for number, one in staying.items():
        assert_same(one["own"], state(replicas[job.names[number]]), (name, number))


STREAMING = {"overlap_steps": 2, "mixing_factor": 0.3}


def test_those_that_come_start_from_the_others_state(tmp_path: Path) -> None:
    """In the place of one that has died, or besides the others; also when averages are under way."""
    jobs = {
        "comes back": Job(comes=(1,), fates={1: "dies"}),
        "comes back, outer state": Job(DILOCO, NESTEROV, comes=(1,), fates={1: "dies"}),
        "the first comes back": Job(DILOCO, NESTEROV, comes=(0,), fates={0: "dies"}),
        "of two": Job(DILOCO, NESTEROV, replicas=2, comes=(1,), fates={1: "dies"}),
        "one more": Job(DILOCO, NESTEROV, replicas=2, comes=(2,)),
        "two at once": Job(replicas=2, comes=(2, 3)),
        "streaming": Job({**DILOCO, **STREAMING}, {**NESTEROV, **STREAMING}, replicas=2, comes=(2,), period=4),
        "states": Job({"average_optimizer_states": True}, {"average_states": True}, replicas=2, comes=(2,)),
    }
    run(jobs, tmp_path)


def test_one_that_is_not_taken_in_does_not_keep_the_others(tmp_path: Path) -> None:
    fates = ("die asking", "die in the handover", "another period", "another model")
    jobs = {fate: Job(DILOCO, NESTEROV, replicas=2, comes=(2,), fate=fate) for fate in fates}
    jobs["die in the flag"] = Job(replicas=2, comes=(2,), fate="die in the flag")
    # It has a part of the outer state already, if there is one, which is lost with it.
    jobs["die before the rest"] = Job(replicas=2, comes=(2,), fate="die before the rest")
    outcomes = run(jobs, tmp_path)
    assert_raised(outcomes["another period"][2]["raised"], "ValueError", "period")
    assert_raised(outcomes["another model"][2]["raised"], "ValueError", "1.weight")


def test_one_that_stops_for_too_long_is_left_out_and_learns_it(tmp_path: Path) -> None:
    """Its process is stopped, or its main thread hangs while others live."""
    jobs = {
        "freezes": Job(DILOCO, NESTEROV, fates={1: "freezes"}),
        "the first freezes": Job(DILOCO, NESTEROV, fates={0: "freezes"}),
        "hangs": Job(DILOCO, NESTEROV, fates={1: "hangs"}, timeout_s=20),
    }
    outcomes = run(jobs, tmp_path)
    for name, job in jobs.items():
        [late] = job.fates
        assert_raised(outcomes[name][late]["raised"], "LeftOutError", "the others have continued without it")
        assert outcomes[name][late]["steps"] < 2 * job.period, "it has not continued with weights of its own"


def train_through(folder: Path, address: str) -> dict[str, Any]:
    """Trains, while the lighthouse ends before the fifth step."""
    rank = int(os.environ["RANK"])
    become_replica(address, rank, 2)
    model = seeded_mlp(batch_norm=True)
    optimizer = OPTIMIZERS["sgd"](model)
    sync = LocalSGD(model, optimizer, period=3, timeout_s=TIMEOUT_S)
    sync.join()
    for i in range(9):
        if i == LOST_AT:
            (folder / f"{rank} is there").touch()
            wait_for((folder / "it has ended").exists)
        optimizer.zero_grad()
        loss(model, i, rank).backward()
        sync.step()
    own = state(model)
    sync.detach()
    return own


def test_a_round_waits_for_a_lighthouse_that_is_started_again(tmp_path: Path) -> None:
    with ExitStack() as first:
        address = first.enter_context(lighthouse())

        def restart() -> None:
            wait_for(lambda: all((tmp_path / f"{rank} is there").exists() for rank in range(2)))
            first.close()
            (tmp_path / "it has ended").touch()
            time.sleep(1)  # both ask in vain meanwhile
            again.enter_context(lighthouse(int(address.rpartition(":")[2])))

        with ExitStack() as again:
            thread = threading.Thread(target=restart)
            thread.start()
            outcomes = on_ranks(train_through, 2, tmp_path, address, init=False)
            thread.join()
    replicas = simulate(
        seeded_mlp(batch_norm=True), OPTIMIZERS["sgd"], loss, world_size=2, num_steps=9, period=3, lost={}
    )
    for rank, own in enumerate(outcomes):
        assert_same(own, state(replicas[rank]), rank)


def train_until_frozen(folder: Path, addresses: list[str]) -> dict[str, Any]:
    """Trains for 9 steps; replica 1 freezes in the fifth one, or before the end, until the other has ended."""
    replica, job = divmod(int(os.environ["RANK"]), 2)
    folder = folder / str(job)
    folder.mkdir(exist_ok=True)
    become_replica(addresses[job], replica, 2)
    model = seeded_mlp(batch_norm=True)
    optimizer = OPTIMIZERS["sgd"](model)
    sync = LocalSGD(model, optimizer, period=5, timeout_s=TIMEOUT_S)
    sync.join()

    def train() -> None:
        for i in range(9):
            if i == LOST_AT and job == 0:
                meet()
            optimizer.zero_grad()
            loss(model, i, replica).backward()
            sync.step()
        if job == 1:
            meet()
        sync.end()

    def meet() -> None:
        if replica == 1:
            freeze(folder)
        else:
            wait_for(lambda: stopped(folder / "frozen"))

    error = raised(train)
    sync.detach()
    if replica == 0:
        wake(folder)
    return {"raised": error}


def test_one_that_stops_until_all_others_have_ended_does_not_train_on_alone(tmp_path: Path) -> None:
    with lighthouse() as in_step, lighthouse() as at_end:
        outcomes = on_ranks(train_until_frozen, 4, tmp_path, [in_step, at_end], init=False)
    for other, late in zip(outcomes[:2], outcomes[2:], strict=True):
        assert other == {"raised": None}
        assert_raised(late["raised"], "LeftOutError", "the others have continued without it")
