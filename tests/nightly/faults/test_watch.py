"""A rank's watch: a fault is that of its own run, and is said before NCCL's watchdog aborts the process."""

from __future__ import annotations

import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.faults.failure import PeerWatch
from tests.support.commands import environment
from tests.support.harness import on_ranks, raised, slots

TIMEOUT_S = 8.0


def leave_in_turns() -> dict[str, Any]:
    """What rank 1 reads when rank 0 is no longer there, or late, and the faults that later watches begin with."""
    found: dict[str, Any] = {}
    rank, group = dist.get_rank(), dist.new_group(backend="gloo")
    for run in ("ends", "raises", "is late"):
        transport = Transport(timeout_s=TIMEOUT_S)
        watch = PeerWatch(timedelta(seconds=TIMEOUT_S), lambda: 0)
        watch.start(group)  # as under an agent that keeps the store for the next run
        for _ in range(3):
            transport.exchange_flags(1).wait()
        found[f"before it {run}"] = watch.fault
        dist.barrier()
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


WATCHDOG = """
import os, sys, threading, time
from datetime import timedelta
import torch.distributed as dist
from lightning_pipesync.core.comm import groups
from lightning_pipesync.core.faults import heartbeat
from lightning_pipesync.core.faults.failure import PeerWatch

heartbeat.INTERVAL = 0.2
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
watch = PeerWatch(timedelta(seconds=2))
watch.announces = True
watch.start(dist.group.WORLD)
dist.barrier()
time.sleep(0.5)
if rank == 1:
    os.kill(os.getpid(), 19)

def abort():
    os.write(2, b"NCCL's watchdog aborts the process\\n")
    os.abort()

threading.Timer(watch.timeout.total_seconds() + groups.LATER.total_seconds() / 6, abort).start()
threading.Event().wait()  # as in a kernel of NCCL's, which nothing ends
"""


def test_what_is_said_of_a_lost_rank_comes_before_an_abort_of_nccls_watchdog(tmp_path: Path) -> None:
    """Here a thread stands in for it: it ends the process before the timeout of NCCL's groups."""
    with slots(2):
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", WATCHDOG, str(rank), str(tmp_path / "store")],
                stderr=subprocess.PIPE,
                text=True,
                env=environment(),
            )
            for rank in (0, 1)
        ]
        try:
            _, said = ranks[0].communicate(timeout=250)
        finally:
            for each in ranks:
                each.kill()
                each.wait()
    assert ranks[0].returncode == -signal.SIGABRT
    ours, abort = (said.find(words) for words in ("Rank 1 ", "NCCL's watchdog"))
    assert 0 <= ours < abort, said
    assert said.count("is at fault") == 1
