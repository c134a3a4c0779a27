"""How a process ends: with the exit code and the last line that it should have, and without a thread that aborts it.

A program forks a process for each script, whose interpreter ends as that of the script does.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.commands import environment
from tests.support.harness import free_port, slots

PROGRAM = """
import atexit
at_the_end = []
atexit.register(lambda: [call() for call in at_the_end])  # what is registered first is called last
import os, sys, threading, time
import torch
import torch.distributed as dist
import lightning_pipesync
torch.set_num_threads(1)

def has_threads():
    return any("gloo" in open(f"/proc/self/task/{each}/comm").read() for each in os.listdir("/proc/self/task"))

folder, *scripts = sys.argv[1:]
children = {}

def wait():
    child, status = os.wait()
    print(children.pop(child), os.waitstatus_to_exitcode(status), flush=True)

for number, script in enumerate(scripts):
    child = os.fork()
    if child == 0:
        output = os.open(f"{folder}/{number}", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ["TORCHELASTIC_ERROR_FILE"] = f"{folder}/{number}.json"
        del sys.argv[1:]
        exec(script)
        sys.exit()
    children[child] = number
    if len(children) == 4:
        wait()
while children:
    wait()
"""
GROUP = """
from lightning_pipesync.core.comm.transport import Transport
at_the_end.append(lambda: print("open at the end:", dist.is_initialized()))
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:{port}", rank=0, world_size=1)
Transport().close()
"""
THREADS = """
from lightning_pipesync.core.faults.shutdown import destroy_process_groups_at_shutdown
at_the_end.append(lambda: print("at the end:", has_threads()))
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:{port}", rank=0, world_size=1)
for _ in range(1000):  # a thread names itself, once it runs
    if has_threads():
        break
    time.sleep(0.01)
print("before:", has_threads())
torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)  # imports much of torch
destroy_process_groups_at_shutdown()
"""
LATE = """
from lightning_pipesync.core.faults import shutdown
thread = threading.Thread(target=lambda: time.sleep({seconds}), name="late", daemon=True)
thread.start()
shutdown.join_thread(thread, 0.1)
"""
WAITING = """
import signal
from functools import partial
from lightning_pipesync.core.comm.comm_queue import CommQueue
from lightning_pipesync.core.comm.transport import Transport
rank = int(os.fork() == 0)
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
ENDS = """
from lightning_pipesync.core.faults.errors import add_last_line
from lightning_pipesync.core.faults.shutdown import report_error_at_shutdown
report_error_at_shutdown()
report_error_at_shutdown()
lost = RuntimeError("Connection closed by peer")
add_last_line(lost, "Rank 1 is at fault")
"""
RECORDED = """
import json
with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
    json.dump({"message": {"message": "what @record has written"}}, file)
"""
UNCAUGHT = """
from lightning_pipesync.core.faults.errors import add_last_line
from lightning_pipesync.core.faults.shutdown import call_if_uncaught
undo = call_if_uncaught(lambda error: add_last_line(error, "the last line"))
"""

#: By name: the script, its exit code, and what its output ends with.
SCRIPTS: dict[str, tuple[str, int, str]] = {
    "the default group is destroyed": (GROUP, 0, "open at the end: False"),
    "also if the user has": (GROUP + "dist.destroy_process_group()", 0, "open at the end: False"),
    "not after an error": (GROUP + "1 / 0", 1, "open at the end: True"),
    "its threads end, which could abort the process": (THREADS, 0, "before: True\nat the end: False"),
    "a thread ends late": (LATE.format(seconds=1), 0, ""),
    "a thread never ends": (LATE.format(seconds=1000) + "shutdown.LAST_S = 0.5", 0, ""),
    "nor after an exit": (LATE.format(seconds=1000) + "shutdown.LAST_S = 0.5; raise SystemExit(3)", 3, ""),
    "nor after an error": (LATE.format(seconds=1000) + "1 / 0", 1, "ZeroDivisionError: division by zero"),
    "a thread waits for a peer, whose end it sees last": (WAITING, 1, "KeyError: 'a bug in the loop'"),
    "an error gets its last line": (UNCAUGHT + "raise RuntimeError('a message')", 1, "a message\nthe last line"),
    "not at a prompt": (UNCAUGHT + "sys.ps1 = '>>>'; raise RuntimeError('a message')", 1, "RuntimeError: a message"),
    "nor if that was undone": (UNCAUGHT + "undo(); raise RuntimeError('a message')", 1, "RuntimeError: a message"),
    "nor does an exit": (UNCAUGHT + "sys.exit('a message')", 1, "a message"),
    "an error of torchrun's file": (ENDS + "raise KeyError('a bug')", 1, "KeyError: 'a bug'"),
    "one that @record has written": (ENDS + RECORDED + "raise KeyError('a bug')", 1, "KeyError: 'a bug'"),
    "one that names a rank": (ENDS + RECORDED + "raise lost", 1, "closed by peer\nRank 1 is at fault"),
    "no error of torchrun's file": (ENDS + "sys.exit(3)", 3, ""),
}
if sys.version_info >= (3, 11):  # which has notes
    SCRIPTS["an error of several words gets it, too"] = (UNCAUGHT + "raise KeyError('a', 'b')", 1, "the last line")
#: Those that have their turn before each commit.
QUICK, NIGHTLY = tuple(SCRIPTS)[::2], tuple(SCRIPTS)[1::2]
#: What the file for torchrun's agent says at last.
REPORTED = {
    "an error of torchrun's file": "KeyError: 'a bug'",
    "one that @record has written": "what @record has written",
    "one that names a rank": "RuntimeError: Connection closed by peer\nRank 1 is at fault",
    "no error of torchrun's file": None,
}


@cache
def ended(names: tuple[str, ...]) -> dict[str, tuple[int, str, str | None]]:
    """Returns of each script the exit code, the output, and what it has reported to torchrun's agent."""
    scripts = [SCRIPTS[name][0].replace("{port}", str(free_port())) for name in names]
    with TemporaryDirectory() as folder, slots(4):
        command = [sys.executable, "-c", PROGRAM, folder, *scripts]
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            start_new_session=True,
        ) as program:
            try:
                codes_of_scripts, errors = program.communicate(timeout=900)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(program.pid, signal.SIGKILL)  # also a process that a script has stopped
        assert program.returncode == 0, errors
        codes = dict(map(int, line.split()) for line in codes_of_scripts.splitlines())
        found = {}
        for number, name in enumerate(names):
            file = Path(folder) / f"{number}.json"
            reported = json.loads(file.read_text())["message"]["message"] if file.exists() else None
            found[name] = codes[number], (Path(folder) / str(number)).read_text(), reported
        return found


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc, where Linux lists threads")
@pytest.mark.parametrize("name", QUICK)
def test_a_process_ends_as_it_should(name: str) -> None:
    assert_ended(name, QUICK)


def assert_ended(name: str, names: tuple[str, ...]) -> None:
    code, output, reported = ended(names)[name]
    assert code == SCRIPTS[name][1], output
    assert output.rstrip().endswith(SCRIPTS[name][2]), output
    if name in REPORTED:
        assert reported == REPORTED[name]
