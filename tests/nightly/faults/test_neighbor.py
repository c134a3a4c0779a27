"""A rank that falls silent is found by the one that listens to it, whatever the others wait for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_pipesync.core.faults.failure import PeerWatch
from lightning_pipesync.core.faults.heartbeat import Beat
from lightning_pipesync.core.faults.neighbor import Neighbor
from tests.support.commands import environment
from tests.support.harness import launch
from tests.support.lost_ranks import be_patient

TIMEOUT_S = 8.0


def heard(neighbor: Neighbor, numbers: list[int], step: float = 1.0) -> list[bool]:
    return [neighbor.hear(Beat(number, pid=1), step * time_) for time_, number in enumerate(numbers)]


def test_a_rank_is_lost_once_it_was_silent_for_the_timeout() -> None:
    assert heard(Neighbor(0, 3, TIMEOUT_S), [1, 2, *[3] * 9]) == [*[False] * 10, True]
    assert not any(heard(Neighbor(0, 3, TIMEOUT_S), [number // 7 for number in range(40)]))
    assert heard(Neighbor(0, 3, TIMEOUT_S), [0] * 9)[-1], "or has never published a beat"


def test_the_time_in_which_this_process_was_frozen_does_not_count() -> None:
    neighbor = Neighbor(0, 2, TIMEOUT_S)
    assert not neighbor.hear(Beat(1), 0.0)
    assert not neighbor.hear(Beat(1), 1000.0)
    assert not neighbor.hear(Beat(2), 1001.0)


def test_each_listens_to_the_next_that_has_not_ended() -> None:
    neighbor = Neighbor(1, 4, TIMEOUT_S)
    heard_ranks = []
    for now in range(4):
        heard_ranks.append(neighbor.rank)
        neighbor.hear(Beat(5, left=""), float(now))
    assert heard_ranks == [2, 3, 0, 1]
    assert not Neighbor(0, 1, TIMEOUT_S).is_due(0.0), "nobody is there"


def test_it_is_heard_now_and_then() -> None:
    neighbor = Neighbor(0, 2, TIMEOUT_S)
    assert neighbor.is_due(0.0)
    neighbor.hear(Beat(1), 0.0)
    assert not neighbor.is_due(0.5)
    assert neighbor.is_due(1.0)


def compute_while_one_is_frozen(folder: Path) -> Any:
    """Ranks 0 and 2 wait for nobody; rank 1 is frozen after its first beats, and nobody has its messages."""
    be_patient()
    rank = dist.get_rank()
    watch = PeerWatch(timedelta(seconds=TIMEOUT_S))
    watch.survives_loss = rank == 2
    group = dist.group.WORLD
    assert group is not None
    watch.start(group)
    (folder / str(rank)).touch()
    while len(list(folder.iterdir())) < 3:
        time.sleep(0.05)
    time.sleep(2.0)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while watch.fault is None and time.monotonic() < deadline:
        time.sleep(0.1)
    fault = watch.fault
    (folder / f"{rank} has found it").touch()
    while len(list(folder.glob("* has found it"))) < 2:
        time.sleep(0.05)
    if rank == 0:  # only now may the frozen one end
        for status in Path("/proc").glob("[0-9]*/stat"):
            state, parent = status.read_text().rsplit(")", 1)[1].split()[:2]
            if state == "T" and int(parent) == os.getppid():
                os.kill(int(status.parent.name), signal.SIGKILL)
    watch.close()
    return fault and (fault.kind, fault.rank, fault.pid)


def test_a_frozen_rank_is_found_though_nobody_waits_for_it(tmp_path: Path) -> None:
    first, _, last = launch(compute_while_one_is_frozen, 3, tmp_path, may_die=(1,))
    assert first == last
    assert first[:2] == ("silent", 1)
    assert first[2] > 0


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
if rank == 1:
    print(os.getpid(), flush=True)
    os.kill(os.getpid(), 19)

def abort():
    os.write(2, b"NCCL's watchdog aborts the process\\n")
    os.abort()

threading.Timer(watch.timeout.total_seconds() + groups.LATER.total_seconds() / 6, abort).start()
threading.Event().wait()  # as in a kernel of NCCL's, which nothing ends
"""


def test_what_is_said_of_a_lost_rank_comes_before_an_abort_of_nccls_watchdog(tmp_path: Path) -> None:
    """Here a thread stands in for it: it ends the process before the timeout of NCCL's groups."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", WATCHDOG, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        for rank in (0, 1)
    ]
    try:
        _, said = ranks[0].communicate(timeout=200)
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    assert ranks[0].returncode == -signal.SIGABRT
    ours, abort = (said.find(words) for words in ("Rank 1 (host ", "NCCL's watchdog"))
    assert 0 <= ours < abort, said
    assert f"pid {ranks[1].pid}) is at fault" in said
    assert said.count("is at fault") == 1


UNCAUGHT = """
import sys
from lightning_pipesync.core.faults.errors import add_last_line
from lightning_pipesync.core.faults.uncaught import call_if_uncaught

def call(error):
    add_last_line(error, "the last line")

undo = call_if_uncaught(call)
{body}
"""


@pytest.mark.parametrize(
    ("body", "last"),
    [
        ("raise RuntimeError('a message')", "the last line"),
        ("sys.ps1 = '>>>'\nraise RuntimeError('a message')", "RuntimeError: a message"),
        ("undo()\nraise RuntimeError('a message')", "RuntimeError: a message"),
        ("sys.exit('a message')", "a message"),
        pytest.param(
            "raise KeyError('a', 'b')",
            "the last line",
            marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="needs notes, of Python 3.11"),
        ),
    ],
)
def test_an_error_that_ends_the_process_gets_its_last_line_before_it_is_printed(body: str, last: str) -> None:
    command = [sys.executable, "-c", UNCAUGHT.format(body=body)]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert result.stderr.splitlines()[-1] == last
