"""A transport on real processes: its groups and topologies, states and messages, and what it says of a lost peer."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lightning_pipesync.core.comm import traffic
from lightning_pipesync.core.comm.handle import Promise, Worker
from lightning_pipesync.core.comm.nccl import NcclExchange
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.consistency import check_same
from tests.support.case_table import launch_cases
from tests.support.harness import (
    DIED,
    assert_raised,
    assert_refused,
    call_on_hosts,
    kill_stopped_siblings,
    launch,
    on_ranks,
    raised,
)
from tests.support.lost_ranks import be_patient


def collect_unsafe() -> list[float] | None:
    transport = Transport(timeout_s=60)
    both = torch.arange(6, dtype=torch.bfloat16)
    parts = {"left": both[:3], "right": both[2:]}
    with mock.patch("torch.save", side_effect=AssertionError), mock.patch("torch.load", side_effect=AssertionError):
        states = transport.collect_states({"lr": np.float64(0.5), "tuple": (1, {2}), "tied": [both, both], **parts})
    transport.close()
    for state in states or []:
        assert torch.equal(state["tied"][0], both)
        assert state["tied"][0] is state["tied"][1]
        state["left"][2] = 7  # they share memory, as before
        assert state["right"][0] == state["tied"][0][2] == 7
    return None if states is None else [float(state["lr"]) for state in states]


def beside_nccl() -> list[float]:
    transport = Transport(timeout_s=60)
    transport._nccl = transport._exchange = mock.Mock(spec=NcclExchange)
    flats = [torch.full((3,), float(transport.rank + 1)) for _ in range(2)]
    transport.all_reduce(flats[0]).wait()
    transport.reduce_scatter(flats[1], mean=True).wait()
    transport.all_gather(flats[1]).wait()
    transport.close()
    return [flat[-1].item() for flat in flats]


def test_states_and_tensors_of_the_host() -> None:
    """A NumPy number as a learning rate must neither raise on rank 0 nor leave the others waiting, and what replaces
    ``torch.save``, to count what is written, is not asked; a tensor of the host never goes to NCCL."""
    outcomes = launch_cases({"states": collect_unsafe, "host": beside_nccl}, 2)
    assert outcomes["states"] == [[0.5, 0.5], None]
    assert outcomes["host"] == [[3.0, 1.5]] * 2


def messages() -> list[float]:
    transport = Transport(timeout_s=60)
    left, right = (transport.rank - 1) % transport.world_size, (transport.rank + 1) % transport.world_size
    received = [torch.empty(4) for _ in range(3)]
    receiving = [transport.recv(tensor, left) for tensor in received]
    sending = [transport.send(torch.full((4,), float(10 * transport.rank + i)), right) for i in range(3)]
    for handle in [*receiving, *sending]:
        handle.wait()
    assert transport.traffic.bytes_sent["send"] == 3 * 16
    states = transport.collect_states({"rank": transport.rank, "x": torch.arange(transport.rank + 1)})
    assert (states is None) == (transport.rank != 0)
    for rank, state in enumerate(states or []):
        assert state["rank"] == rank
        assert torch.equal(state["x"], torch.arange(rank + 1))
    transport.close()
    return [tensor[0].item() for tensor in received]


def open_and_close() -> None:
    for _ in range(10):
        Transport(timeout_s=60).close()


def policies() -> tuple[set[int], int]:
    """Returns the scheduling policies of the new loops of Gloo, and of the thread that has made them."""
    tasks = Path("/proc/self/task")
    before = {task.name for task in tasks.iterdir()}
    transport = Transport(timeout_s=60)
    new = (task for task in tasks.iterdir() if task.name not in before)
    loops = [int(task.name) for task in new if (task / "comm").read_text().startswith("gloo")]
    found = {os.sched_getscheduler(loop) for loop in loops}
    transport.close()
    return found, os.sched_getscheduler(0)


def refuse() -> None:
    columns = 2 + 2 * (dist.get_rank() % 2)
    assert_refused(
        {
            "timeout_s must be a positive number of seconds, got 0": raised(lambda: Transport(timeout_s=0)),
            "backend='nccl'": raised(lambda: Transport(backend="nccl")),
            "backend='mpi'": raised(lambda: Transport(backend="mpi")),
            "torus_columns=3": raised(lambda: Transport(topology="torus2d", torus_columns=3)),
            "The ranks differ in": raised(lambda: Transport(topology="torus2d", torus_columns=columns)),
        }
    )


def topologies(codecs: list[str]) -> list[str]:
    found = []
    for settings in ({"topology": "auto"}, {"topology": "flat"}, {}):
        transport = Transport(timeout_s=30, codec=codecs[dist.get_rank()], **settings)
        found.append(str(transport.topology))
        transport.close()
    return found


#: By ranks on each host and the ranks' codecs, whether "auto" is a torus of hosts: with a lossy codec everywhere.
AUTO = {
    (2, ("int8",) * 4): True,
    (2, ("none",) * 4): False,
    (2, ("int8", "none", "int8", "int8")): False,  # which the comparison of settings refuses
    (1, ("int8",) * 4): False,
    (3, ("int8",) * 4): False,
    (4, ("int8",) * 4): False,
}


def test_four_ranks() -> None:
    """Messages keep their order; a quick rank may close at once, while others connect; the same is refused on all.

    Gloo's loops, and no other thread, have the policy for batch jobs.
    """
    auto: dict[Any, Any] = {key: partial(call_on_hosts, key[0], topologies, [*key[1]]) for key in AUTO}
    plain = {"messages": messages, "open": open_and_close, "refuse": refuse, "loops": policies}
    outcomes = launch_cases({**plain, **auto}, 4)
    first = [[10.0 * (rank - 1 if rank else 3) + i for i in range(3)] for rank in range(4)]
    assert outcomes["messages"] == first
    assert outcomes["open"] == outcomes["refuse"] == [None] * 4
    own = os.sched_getscheduler(0)  # that of batches, or of idle times, stays
    assert outcomes["loops"] == [({os.SCHED_BATCH if own == os.SCHED_OTHER else own}, own)] * 4
    for key, rows in AUTO.items():
        assert outcomes[key] == [["torus2d with rows of 2 ranks" if rows else "flat", "flat", "flat"]] * 4, key


def test_without_a_process_group() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        Transport()


def test_a_tree_over_nccl_is_refused() -> None:
    transport = mock.Mock(spec=Transport, backend="nccl", device="cuda:0", ranks=range(2))
    transport.gather_objects = lambda own: [own, own]
    transport._groups, transport._control = mock.Mock(), None
    outcome = raised(lambda: Transport._arrange(transport, "tree", None, False))
    assert_raised(outcome, "ValueError", "topology='tree'", "over NCCL", "set topology='flat' or 'torus2d'")


def test_a_wait_within_another_counts_once_and_a_worker_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exposed communication is what the training has waited for."""
    monkeypatch.setattr(traffic, "time", SimpleNamespace(perf_counter=iter(range(100)).__next__))
    counted, done, worker = traffic.Traffic(), Promise[None](), Worker("test")

    def wait_twice() -> None:
        with counted.waiting("outer"), counted.waiting("inner"):
            pass

    wait_twice()
    worker.submit(lambda: done.run(wait_twice))
    done.wait()
    worker.close(60)
    assert counted.seconds_waited == {"outer": 1}


#: Of one that hangs; of one that dies far more than the test may take.
TIMEOUTS_S = {"dies": 300, "hangs": 10}


def lose_a_peer(how: str, operation: str) -> tuple[str, str] | None:
    be_patient()
    transport = Transport(timeout_s=TIMEOUTS_S[how])
    transport.all_reduce(torch.ones(100)).wait()
    if transport.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)
    flat = torch.ones(1_000_000)
    outcome = raised(
        lambda: transport.all_reduce(flat).wait() if operation == "all_reduce" else transport.exchange_flags(0).wait()
    )
    transport.close(timeout_s=0)
    if transport.rank == 0 and how == "hangs":
        kill_stopped_siblings()
    return outcome


@pytest.mark.parametrize(("how", "operation"), [("dies", "all_reduce"), ("hangs", "flags")])
def test_a_lost_peer_raises_on_the_others(how: str, operation: str) -> None:
    outcomes = launch(lose_a_peer, 3, how, operation, may_die=(1,))
    assert outcomes[1] == DIED
    for outcome in (outcomes[0], outcomes[2]):
        assert_raised(outcome, "RuntimeError", f"timeout_s={TIMEOUTS_S[how]}")
        assert outcome[1].startswith("Rank 1 (host ")


def broadcast_objects() -> tuple[list[Any], list[int]]:
    """Returns what each rank sent, and the numbers of objects that this rank has gathered to compare descriptions."""
    transport = Transport(timeout_s=60)
    objects = [transport.broadcast_object({"rank": transport.rank}, src) for src in range(transport.world_size)]
    gathered: list[Any] = []
    gather = transport.gather_objects

    def note(obj: Any) -> list[Any]:
        gathered.append(obj)
        return gather(obj)

    with mock.patch.object(transport, "gather_objects", note):
        described = [(f"parameter {number}", "float32") for number in range(1000)]
        check_same(transport, described)
        last = "float64" if transport.rank == 2 else "float32"
        error = raised(lambda: check_same(transport, [*described, ("the last", last)]))
    transport.close()
    assert_raised(error, "ValueError", "the last: rank 0 has float32, rank 2 has float64")
    return objects, [len(repr(obj)) for obj in gathered]


def test_objects_are_broadcast_and_descriptions_compared_by_digests() -> None:
    for objects, sizes in on_ranks(broadcast_objects, 3):
        assert objects == [{"rank": rank} for rank in range(3)]
        assert max(sizes) < 100
