"""Replicas that are jobs of their own, in plain loops: lost in any phase, asked to leave, or coming; as simulated."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, Optimizer

from lightning_pipesync.core.comm.gloo import GlooExchange
from lightning_pipesync.core.comm.messages import Messages
from lightning_pipesync.core.faults import notice
from lightning_pipesync.methods.replicas import jobs
from lightning_pipesync.methods.replicas.averages import Averages
from lightning_pipesync.methods.replicas.jobs import ElasticReplicaMethod
from lightning_pipesync.methods.replicas.membership import Membership
from lightning_pipesync.methods.replicas.replica import Replica
from tests.references.selsync import average
from tests.support.harness import DIED, assert_raised, launch
from tests.support.lost_ranks import die, freeze, wait_for
from tests.support.models import assert_same, state
from tests.support.replica_jobs import (
    DILOCO,
    NESTEROV,
    ROUND,
    TIMEOUT_S,
    Job,
    at_step,
    run,
    simulated,
    when_called,
)

Act = Callable[[], object]


def in_average(act: Act, folder: Path, others: int) -> None:
    """Acts when the second average starts."""
    when_called(Averages, "start", 1, act)


def when_marked(act: Act, folder: Path, others: int) -> None:
    """Acts when all others have all data of the marked round, and tell each other so."""
    wait_for(lambda: len(list(folder.iterdir())) == others)
    act()


def in_flag(act: Act, folder: Path, others: int) -> None:
    when_called(Membership, "commit", ROUND, partial(when_marked, act, folder, others))


def die_in_sum() -> None:
    when_called(GlooExchange, "_sum_values", 0, die)


def die_in_gather(arrived: Act = lambda: time.sleep(0.5)) -> None:
    """Dies when one of the others has all data of the next all-reduce, and the other has not."""
    when_called(GlooExchange, "_gather_slices", 0, partial(die_while_sending, arrived))


def die_while_sending(arrived: Act = lambda: time.sleep(0.5)) -> None:
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


def in_gather(folder: Path, others: int) -> None:
    in_average(partial(die_in_gather, lambda: wait_for((folder / "2").exists)), folder, others)


def under_way(folder: Path, others: int) -> None:
    """Dies under the second average when all others have started it."""
    waits = partial(when_marked, die, folder, others)
    in_average(lambda: when_called(GlooExchange, "_sum_values", 0, waits), folder, others)


def in_states(folder: Path, others: int) -> None:
    when_called(Replica, "_average_states", 1, die_in_gather)


def in_new_shards(folder: Path, others: int) -> None:
    """Dies while those that are left after another loss share the outer state anew."""
    when_called(jobs, "resharded", 0, die_in_sum)


def in_handover(folder: Path, others: int) -> None:
    """Dies as it gets the others' state."""
    when_called(ElasticReplicaMethod, "_take_over", 0, die)


def before_the_rest(folder: Path, others: int) -> None:
    when_called(ElasticReplicaMethod, "receive_rest", 0, die)


def ask_to_leave() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def leave_at_once(folder: Path, others: int) -> None:
    """Is asked to leave so late that the next average comes too late."""
    notice.LEAVE_S = 0
    at_step(4, ask_to_leave)(folder, others)


def freeze_in_step(folder: Path, others: int) -> None:
    """Stops until the others have gone on."""
    at_step(4, partial(freeze, folder))(folder, others)


def center(parameters: list[Tensor], ranks: int) -> Optimizer:
    return SGD(parameters, lr=ranks * (0.9 / ranks))


sums = partial(in_average, die_in_sum)
leave = at_step(4, ask_to_leave)
ONE_MORE: dict[str, Any] = {"replicas": 2, "comes": (2,)}
FEDAVG: dict[str, Any] = {"settings": {}, "given": {}}
WITH_STATES: dict[str, Any] = {"settings": {"average_optimizer_states": True}, "given": {"average_states": True}}
_OVERLAP = {"overlap_steps": 2, "mixing_factor": 0.3}
STREAMING: dict[str, Any] = {
    "settings": {**DILOCO, **_OVERLAP},
    "given": {**NESTEROV, **_OVERLAP},
    "batch_norm": False,
    "period": 4,
    "num_steps": 15,
}
STREAMING_LOST = {**STREAMING, "given": {**STREAMING["given"], "dropped": [8]}}

#: The average in which one dies is without it, unless all others have all data of it.
LOST = {
    "the first, sums": Job(fates={0: sums}, lost={0: 6}),
    "gather": Job(fates={1: in_gather}, lost={1: 6}, batch_norm=False),
    "flag": Job(fates={1: partial(in_flag, die_while_sending)}, lost={1: 9}),
    "states": Job(fates={1: in_states}, lost={1: 6}, **WITH_STATES),
    "validation": Job(fates={1: partial(in_flag, die)}, lost={1: 9}, evaluates=True),
    "under way": Job(fates={1: under_way}, lost={1: 8}, **STREAMING_LOST),
    "two at once, then another": Job(fates={1: sums, 2: in_new_shards}, lost={1: 6, 2: 6}, replicas=4),
    "one after the other, EASGD": Job(
        {"outer_optimizer": "elastic"},
        {"make_outer": center, "elastic": 0.9},
        fates={3: sums, 1: at_step(7)},
        lost={3: 6, 1: 9},
        replicas=4,
    ),
    "a share, alone": Job(
        {"participation": 0.5}, {"participation": 0.5}, fates={1: at_step(4)}, lost={1: 6}, replicas=2
    ),
    "int8": Job({**DILOCO, "compression": "int8"}, None, fates={1: sums}),
    "the last average": Job(fates={1: partial(in_flag, die)}, num_steps=4),
}
LEAVING = {
    "the first": Job(acts={0: leave}, leaving={0: 6}),
    "two of three": Job(acts={1: leave, 2: leave}, leaving={1: 6, 2: 6}),
    "streaming": Job(acts={1: leave}, leaving={1: 8}, **STREAMING),
    "at once": Job(acts={1: leave_at_once}, lost={1: 6}),
}
COMING = {
    "one more, streaming": Job(**STREAMING, **ONE_MORE),
    "two at once, states": Job(**WITH_STATES, replicas=2, comes=(2, 3)),
    "the first comes back": Job(fates={0: at_step(3)}, lost={0: 6}, comes=(0,)),
    "dies in the handover": Job(fates={2: in_handover}, **ONE_MORE),
    "dies before the rest": Job(fates={2: before_the_rest}, **FEDAVG, **ONE_MORE),
    "another period": Job(differs={"period": 4}, **ONE_MORE),
    "another model": Job(differs={"batch_norm": False}, **ONE_MORE),
    "freezes": Job(acts={1: freeze_in_step}, lost={1: 6}),
}


def test_the_others_go_on_without_those_that_are_lost(tmp_path: Path) -> None:
    found = run(LOST, tmp_path)
    assert (tmp_path / "gather" / "2").exists(), "it had all data, and has undone the average that another had not"
    job = LOST["the last average"]
    replicas = simulated(job, job.num_steps)
    average([list(replica.parameters()) for replica in replicas.values()])
    average([list(replica.buffers()) for replica in replicas.values()])
    for number in job.staying:
        assert_same(found["the last average"][number]["last"], state(replicas[number]))


def test_nothing_is_lost_with_those_that_leave(tmp_path: Path) -> None:
    for name, outcomes in run(LEAVING, tmp_path).items():
        job = LEAVING[name]
        for number in job.acts:
            end = job.leaving.get(number, 5)
            left = outcomes[number]
            assert (left["status"], left["steps"], left["place"]) == (143, end, end), (name, number)
            assert_same(left["own"], state(simulated(job, end)[number]), (name, number))
        [goodbye] = outcomes[job.staying[0]]["said"]  # had their connections broken, they would be lost
        assert goodbye.startswith("Said goodbye to "), goodbye


def test_those_that_come_start_from_the_others_state_or_say_why_not(tmp_path: Path) -> None:
    outcomes = run(COMING, tmp_path)
    assert_raised(outcomes["another period"][2]["raised"], "ValueError", "period")
    assert_raised(outcomes["another model"][2]["raised"], "ValueError", "1.weight")
    left_out = outcomes["freezes"][1]
    assert_raised(left_out["raised"], "LeftOutError", "the others have continued without it")


def listen(folder: Path) -> None:
    """Gets a signal twice, and after a pause once more."""
    notice.SAME_S = 0.2
    one = notice.Notice()
    signal.signal(signal.SIGTERM, before := lambda *_: None)
    one.listen()
    assert signal.getsignal(signal.SIGTERM) is before, "the program's own handler stays"
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    one.listen()
    ask_to_leave()
    assert one.deadline is not None
    ask_to_leave()  # a launcher passes it on
    (folder / "still there").touch()
    time.sleep(2 * notice.SAME_S)
    ask_to_leave()
    (folder / "and again").touch()


def test_another_sigterm_ends_a_process_at_once(tmp_path: Path) -> None:
    assert launch(listen, 1, tmp_path, init=False, may_die=(0,)) == [DIED]
    assert [path.name for path in tmp_path.iterdir()] == ["still there"]
