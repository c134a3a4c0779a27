"""What becomes of the default process group, which frameworks leave open, and of its threads when a process ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.harness import free_port

# What is registered with atexit first is called last.
SCRIPT = """
import atexit
atexit.register(lambda: print("open at the end:", dist.is_initialized()))
import torch.distributed as dist
from lightning_pipesync.core.comm.transport import Transport
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:{port}", rank=0, world_size=1)
Transport().close()
{last}
"""


@pytest.mark.parametrize(("last", "is_open"), [("", False), ("dist.destroy_process_group()", False), ("1 / 0", True)])
def test_groups_are_destroyed_before_the_interpreter_ends(last: str, is_open: bool) -> None:
    script = SCRIPT.format(port=free_port(), last=last)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert f"open at the end: {is_open}" in result.stdout, result.stderr
    assert result.returncode == (1 if "/" in last else 0), result.stderr


THREADS = """
import atexit, os, time
threads = lambda: [open(f"/proc/self/task/{{each}}/comm").read().strip() for each in os.listdir("/proc/self/task")]
atexit.register(lambda: print("at the end:", threads()))
import torch
from lightning_pipesync.core.faults.shutdown import destroy_process_groups_at_shutdown
torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:{port}", rank=0, world_size=1)
for _ in range(1000):  # a thread names itself, once it runs
    if "gloo" in threads():
        break
    time.sleep(0.01)
print("before:", threads())
parameter = torch.nn.Parameter(torch.ones(1))
torch.optim.SGD([parameter], 0.1)  # imports much of torch
destroy_process_groups_at_shutdown()
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc, where Linux lists threads")
def test_the_default_group_ends_with_its_threads() -> None:
    """A thread that outlives it may release a tensor while the interpreter shuts down, which aborts the process."""
    script = THREADS.format(port=free_port())
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    before, _, at_the_end = result.stdout.partition("at the end:")
    assert "gloo" in before
    assert "gloo" not in at_the_end


LATE = """
import threading, time
from lightning_pipesync.core.faults import shutdown
thread = threading.Thread(target=lambda: time.sleep({seconds}), name="late", daemon=True)
thread.start()
shutdown.join_thread(thread, 0.1)
{last}
"""


@pytest.mark.parametrize(
    ("seconds", "last", "status"),
    [
        (3, "", 0),
        (1000, "shutdown.LAST_S = 0.5", 0),
        (1000, "shutdown.LAST_S = 0.5; raise SystemExit(3)", 3),
        (1000, "1 / 0", 1),
    ],
)
def test_a_thread_that_ends_late_or_never_does_not_change_the_exit_status(seconds: int, last: str, status: int) -> None:
    script = LATE.format(seconds=seconds, last=last)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert result.returncode == status, result.stderr


WAITING = """
import os, signal, sys, time
from functools import partial
import torch
import torch.distributed as dist
from lightning_pipesync.core.comm.comm_queue import CommQueue
from lightning_pipesync.core.comm.transport import Transport
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:{port}", rank=rank, world_size=2)
transport = Transport(timeout_s=100)
_, peer = transport.gather_objects(os.getpid())
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
queue = CommQueue("waits", transport.device, transport.traffic)
queue.submit("recv", lambda: transport.recv(torch.empty(4), 1))
queue.start_finishing()

class Last:
    def __del__(self, kill=partial(os.kill, peer, signal.SIGKILL), sleep=time.sleep):
        kill()
        sleep(2)

sys.last = Last()
time.sleep(1)  # the thread waits
raise KeyError("a bug in the loop")
"""


def test_a_thread_that_still_waits_for_a_peer_does_not_abort_a_process_that_an_error_ends() -> None:
    """Its wait ends, with the peer's connection, while the interpreter stops."""
    command = [sys.executable, "-c", WAITING.format(port=free_port())]
    with subprocess.Popen([*command, "1"], stderr=subprocess.DEVNULL) as peer:
        try:
            result = subprocess.run([*command, "0"], capture_output=True, text=True, timeout=200)
        finally:
            peer.kill()
    assert "a bug in the loop" in result.stderr
    assert result.returncode == 1, result.stderr
