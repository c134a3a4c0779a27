"""When a rank is lost, all others name it on the last line of their error, whoever each of them has waited for."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_pipesync import DeAR, EAPipe, PipeSGD, SelSync
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.faults.diagnosis import chain, find_fault
from lightning_pipesync.core.faults.errors import is_connection_error
from lightning_pipesync.core.faults.failure import PeerWatch
from lightning_pipesync.core.faults.heartbeat import Beat, Wait, interval_of
from tests.support.harness import DIED, free_port, kill_stopped_siblings, on_ranks, raised
from tests.support.lightning_models import Classifier, make_strategy, train_loader, trainer
from tests.support.lost_ranks import be_patient, wait_for
from tests.support.models import Run, batch

#: By what befalls a rank; of one that dies far more than the test may take.
TIMEOUTS_S = {"killed": 300, "frozen": 15}
#: Of the default process group, where it is not to be a minute: ranks have to start within it.
GROUP_TIMEOUT_S = 20
#: Of a method in a Trainer, where it plays no part, and many ranks set up a training at once.
TRAINER_TIMEOUT_S = 30
RANKS = 3
VICTIM = 1
NAMES = ["dear", "ea_pipe", "pipe_sgd", "selsync"]


class Pipelined:
    """The engine of a pipeline as a loop drives a method."""

    def __init__(self, model: nn.Sequential, _: Any, timeout_s: float) -> None:
        self.model = model
        self.engine = EAPipe(
            model, nn.functional.cross_entropy, lambda parameters: torch.optim.SGD(parameters, 0.1), timeout_s=timeout_s
        )
        self.detach = self.engine.detach

    def step(self) -> None:
        self.model.zero_grad()  # the loop has made a gradient of its own
        self.engine.train_batch(batch(0, 0))


METHODS: dict[str, tuple[type, dict[str, Any]]] = {
    "dear": (DeAR, {"bucket_mb": 1e-4}),
    "ea_pipe": (Pipelined, {}),
    "pipe_sgd": (PipeSGD, {}),
    "selsync": (SelSync, {"delta": 0.0}),
}


def befall(how: str) -> None:
    """What a rank suffers."""
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        os.kill(os.getpid(), signal.SIGSTOP)


def form_group(jobs: dict[Any, int]) -> tuple[Any, int]:
    """Divides the launched ranks into jobs of RANKS each; returns this rank's job and its rank there.

    Rank 0 of a job has its store, as in most jobs.
    """
    job, rank = divmod(int(os.environ["RANK"]), RANKS)
    name, port = list(jobs.items())[job]
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), MASTER_PORT=str(port))
    return name, rank


def launch_jobs(function: Callable[..., Any], jobs: dict[Any, int], *args: Any, **how: Any) -> dict[Any, list[Any]]:
    """Calls ``function(jobs, *args)`` on RANKS ranks for each job; returns what each rank of a job has returned."""
    found = on_ranks(function, RANKS * len(jobs), jobs, *args, init=False, **how)
    return {job: found[RANKS * n : RANKS * (n + 1)] for n, job in enumerate(jobs)}


def train_until_lost(jobs: dict[tuple[str, int], int], how: str) -> dict[str, Any]:
    (name, victim), rank = form_group(jobs)
    be_patient(**({"store_s": 5} if victim == 0 else {}))
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    method, settings = METHODS[name]
    run = Run(method, timeout_s=TIMEOUTS_S[how], **settings)
    steps = 0

    def train() -> None:
        nonlocal steps
        try:
            for i in range(100):
                if i == 3 and rank == victim:
                    befall(how)
                run.step(i)
                steps = i + 1
        finally:
            run.sync.detach()

    outcome = raised(train)
    return {
        "job": (name, victim),
        "rank": rank,
        "pid": os.getpid(),
        "outcome": outcome,
        "steps": steps,
        "threads": [thread.name for thread in threading.enumerate() if "pipesync" in thread.name],
    }


HOW = {
    "killed": "has died",
    "frozen": "is frozen",
    "hangs": "is alive, and has not joined",
}


def assert_names(message: str, rank: int, how: str, timeout_s: int) -> None:
    last = message.splitlines()[-1]
    assert last.startswith(f"Rank {rank} (host "), message
    assert "is at fault: it " in last
    assert HOW[how] in last, last
    assert f"timeout_s={timeout_s}" in last


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_all_others_name_the_rank_that_is_lost(how: str) -> None:
    """Also those that wait for another one, or for whom the store is gone when it is their turn to ask."""
    jobs = {**{(name, VICTIM): free_port() for name in NAMES}, ("selsync", 0): free_port()}
    victims = tuple(RANKS * job + victim for job, (_, victim) in enumerate(jobs))
    outcomes = launch_jobs(reap if how == "frozen" else train_until_lost, jobs, how, may_die=victims)
    for (name, victim), rank in product(jobs, range(RANKS)):
        outcome = outcomes[name, victim][rank]
        if rank == victim:
            assert outcome == DIED
            continue
        assert outcome["steps"] < 100
        assert outcome["outcome"] is not None, outcome
        kind, message = outcome["outcome"]
        assert kind == "RuntimeError"
        if victim == 0 and how == "frozen":  # a call to its store never returns
            assert set(outcome["threads"]) <= {"pipesync-heartbeat"}
        else:
            assert outcome["threads"] == []
        if victim == 0:
            last = message.splitlines()[-1]
            assert last.startswith("Rank 0 (host "), message
            assert f"the store of the job at 127.0.0.1:{jobs[name, victim]}, which it runs, does not answer" in last
        else:
            assert_names(message, victim, how, TIMEOUTS_S[how])


def reap(jobs: Any, how: str) -> dict[str, Any]:
    result = train_until_lost(jobs, how)
    if result["job"][1] == 0:  # that takes longest
        kill_stopped_siblings()
    return result


class Barrier(pl.Callback):
    """Has all ranks meet in the default process group before each step; before the fifth a rank does not come.

    Args:
        befall: what befalls it.
        victim: which one.
        by_strategy: whether the strategy is asked to have them meet, as Lightning does, or torch.
    """

    def __init__(self, befall: Callable[[], object], victim: int, by_strategy: bool) -> None:
        self.befall, self.victim, self.by_strategy = befall, victim, by_strategy

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 4:
            if trainer.global_rank == self.victim:
                self.befall()
            if trainer.global_rank == 1:
                time.sleep(2)  # who is late is not at fault
        trainer.strategy.barrier() if self.by_strategy else dist.barrier()


def fit_until_lost(jobs: dict[tuple[str, str], int], directory: Path) -> tuple[str, str] | None:
    (name, how), rank = form_group(jobs)
    be_patient()
    strategy = make_strategy({"name": name, "timeout_s": TRAINER_TIMEOUT_S})
    if how == "hangs":
        strategy._timeout = timedelta(seconds=GROUP_TIMEOUT_S)
        barrier = Barrier(partial(wait_for_others, directory), 2, True)
    else:
        barrier = Barrier(partial(befall, how), VICTIM, name != "dear")
    run = trainer(strategy, RANKS, directory, callbacks=[barrier])
    outcome = raised(lambda: run.fit(Classifier(), train_loader()))
    (directory / f"{rank} has ended").touch()
    return outcome


def wait_for_others(directory: Path) -> None:
    """Hangs until both of the others have ended."""
    wait_for(lambda: len(list(directory.glob("* has ended"))) == RANKS - 1)


@pytest.mark.parametrize(("how", "names", "victim"), [("killed", NAMES, VICTIM), ("hangs", ["selsync"], 2)])
def test_an_error_of_the_default_group_ends_with_the_rank_that_is_lost(
    how: str, names: list[str], victim: int, tmp_path: Path
) -> None:
    jobs = {(name, how): free_port() for name in names}
    may_die = tuple(RANKS * job + victim for job in range(len(jobs))) if how == "killed" else ()
    outcomes = launch_jobs(fit_until_lost, jobs, tmp_path, may_die=may_die)
    for (name, _), rank in product(jobs, range(RANKS)):
        outcome = outcomes[name, how][rank]
        if rank == victim:
            assert how != "killed" or outcome == DIED
        else:
            assert outcome is not None
            assert_names(outcome[1], victim, how, TRAINER_TIMEOUT_S)
            assert "the default process group" in outcome[1].splitlines()[-1]
            if name == "dear":
                assert "gloo" in outcome[1].splitlines()[0], "Gloo's own message, not that of a method"


#: Of a rank that others wait for.
TIMEOUT_S = 10


def leave_in_turns() -> dict[str, Any]:
    """What rank 1 reads when rank 0 is no longer there, or late, and the faults that later watches begin with."""
    found: dict[str, Any] = {}
    be_patient()
    rank, group = dist.get_rank(), dist.new_group(backend="gloo")
    for run in ("ends", "raises", "is late"):
        transport = Transport(timeout_s=TIMEOUT_S)
        watch = PeerWatch(timedelta(seconds=TIMEOUT_S), lambda: 0)
        watch.start(group)  # as under an agent that keeps the store for the next run
        transport.exchange_flags(1).wait()
        time.sleep(3 * interval_of(TIMEOUT_S))
        found[f"before it {run}"] = watch.fault
        dist.barrier()  # before it, rank 0 may be ahead on a busy machine
        if rank == 1:
            found[run] = raised(transport.broadcast(torch.zeros(9)).wait)
        elif run != "is late":
            for one in (watch, transport.watch):
                one.close({"ends": SystemExit(0), "raises": KeyError("a bug")}[run])
        dist.barrier()
        watch.close()
        transport.close()
    return found


def test_a_fault_is_that_of_its_own_run() -> None:
    """And an exit that is none is no fault; and a broadcast that does not come names who does not send it."""
    for found in (outcomes := on_ranks(leave_in_turns, 2)):
        assert [found[f"before it {run}"] for run in ("ends", "raises", "is late")] == [None] * 3
    found = outcomes[1]
    for run, words in (
        ("ends", "has ended without an error"),
        ("raises", "it raised KeyError: 'a bug'"),
        ("is late", "is alive, and has not joined"),
    ):
        kind, message = found[run]
        assert kind == "RuntimeError"
        assert message.startswith("Rank 0 (host "), message
        assert words in message, message


ANY = Wait("all ranks", None, 5.0)


def waiting_for(peer: int, **of_beat: Any) -> Beat:
    return Beat(number=9, at=9.0, waits=[Wait(f"rank {peer}", peer, 5.0)], **of_beat)


@pytest.mark.parametrize(
    ("beats", "silent", "fault"),
    [
        # 0 waits for 2, that for 1, and that for nobody
        ([waiting_for(2), waiting_for(0), waiting_for(1)], {1}, ("silent", 1)),
        ([waiting_for(2), Beat(9, 9.0), waiting_for(1)], set(), ("absent", 1)),
        ([waiting_for(2), Beat(9, 8.0, left=""), waiting_for(1)], set(), ("ended", 1)),
        ([waiting_for(2), Beat(9, 8.0, left="KeyError: 0"), waiting_for(1)], set(), ("raised", 1)),
        # the first one counts, and who has given up is not at fault
        ([waiting_for(2), Beat(9, 3.0), Beat(9, 7.0, waits=[ANY])], {1, 2}, ("silent", 1)),
        ([waiting_for(2), Beat(9, 3.0), Beat(9, 7.0, left="KeyError: 0")], {1}, ("silent", 1)),
        ([waiting_for(2), Beat(9, 7.0), Beat(9, 7.0, left="KeyError: 0")], {1}, ("raised", 2)),
        ([waiting_for(2), Beat(9, 7.0), Beat(9, 3.0, left="gloo", lost_peer=True)], {1}, ("silent", 1)),
        ([waiting_for(2), Beat(9, 7.0), Beat(9, 3.0, blames=1)], {1, 2}, ("silent", 1)),
        ([waiting_for(2), Beat(9, 7.0), Beat(9, 3.0, blames=1)], set(), ("absent", 1)),
        # who waits for any rank does not wait for one that waits for him
        ([Beat(9, 9.0, waits=[ANY]), Beat(9, 9.0), Beat(9, 9.0, waits=[ANY])], set(), ("absent", 1)),
        ([waiting_for(1), waiting_for(0), Beat(9, 9.0)], set(), ("unconnected", 1)),
        # nobody is blamed again who has been lost before
        ([waiting_for(1), Beat(left="", blames=1), Beat(9, 9.0)], set(), None),
        # who has ended its epoch alone
        ([waiting_for(2), waiting_for(0, ahead="it has ended"), waiting_for(1)], set(), ("ahead", 1)),
        ([waiting_for(1, ahead="it has ended"), waiting_for(0, ahead="it has ended")], set(), ("unconnected", 1)),
        # of those that wait for nobody, who has done least; two that have done as much do not tell who it is
        ([Beat(9, 9.0, waits=[ANY]), Beat(9, 9.0, exchanges=5), Beat(9, 9.0, exchanges=4)], set(), ("absent", 2)),
        ([Beat(9, 9.0, waits=[ANY]), Beat(9, 9.0), Beat(9, 9.0)], set(), None),
    ],
)
def test_who_is_at_fault(beats: list[Beat], silent: set[int], fault: tuple[str, int] | None) -> None:
    found = find_fault(beats, silent, 0, interval=1.0)
    assert (found and (found.kind, found.rank)) == fault


def test_the_chain_of_those_who_wait() -> None:
    assert chain([waiting_for(2), Beat(), waiting_for(1)], 0, 1) == [0, 2, 1]
    assert chain([waiting_for(2), Beat(), Beat()], 0, 1) == []


@pytest.mark.parametrize(
    "message",
    [
        "[/root/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer",
        "Gloo connectFullMesh failed with [/root/gloo/transport/tcp/pair.cc:144] Connect timeout",
        "Application timeout caused pair closure",
    ],
)
def test_gloos_errors_are_connection_errors(message: str) -> None:
    assert is_connection_error(RuntimeError(message))
    assert not is_connection_error(RuntimeError(f"a bug: {message}"))
