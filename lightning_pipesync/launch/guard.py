"""``python guard.py COMMAND...``: runs COMMAND, and leaves nothing of it behind.

Its standard input is a pipe from the launcher. At the end of that file, because the launcher closes it or is gone, it
kills COMMAND and all that this has started, also processes in sessions of their own, as torchrun's ranks are. It does
the same to what COMMAND leaves behind when it ends. Signals are passed on to COMMAND. The exit status is that of
COMMAND, or 128 + n for signal n.

A standalone program, which does not import the package: one of them waits beside each job.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
#: Maximum seconds until killed processes are gone: one that waits for a device may not end.
_DEATH_S = 10.0


def main(*command: str) -> int:
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # Whoever loses its parent becomes a child of this process.
    arrived, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    for number in (signal.SIGCHLD, *_PASSED_ON):
        signal.signal(number, lambda *_: None)
    job = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),  # This process may be killed, too.
    )
    status = None
    while status is None:
        readable, _, _ = select.select([0, arrived], [], [])
        if 0 in readable:
            break
        for sent in os.read(arrived, 4096):
            if sent != signal.SIGCHLD:
                os.kill(job.pid, sent)
        status = _reap().get(job.pid)
    _kill_all()
    if status is None:
        return 128 + signal.SIGKILL
    return status if status >= 0 else 128 - status


def _reap() -> dict[int, int]:
    """Returns the exit statuses of the children that have ended, by their ids; -n after signal n."""
    ended = {}
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])
    return ended


def _kill_all() -> None:
    """Kills all descendants. Those whose parent has been killed are children the next time."""
    deadline = time.monotonic() + _DEATH_S
    while (children := _children()) and time.monotonic() < deadline:
        for process in children:
            os.kill(process, signal.SIGKILL)
        time.sleep(0.01)
        _reap()


def _children() -> list[int]:
    """Returns the ids of this process's children, also of those that have ended and were not waited for."""
    found = []
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:  # It has ended.
            if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                found.append(int(entry))
    return found


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
