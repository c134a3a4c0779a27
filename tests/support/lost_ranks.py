"""Ranks that are lost in a test: the others tell by their processes, as a clock is wrong on a busy machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_pipesync.core.faults import heartbeat

#: What is to happen happens long before: on a busy machine a process may not run for some seconds.
TIMEOUT_S = 60


def runs(pid: int) -> bool:
    """Returns whether a process has neither died nor is frozen."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "TZX"
    return False


def be_patient(beats: int = 10, store_s: float = TIMEOUT_S) -> None:
    """Has this rank count another as silent, and the store as lost, later than usual: one may only be held up."""
    heartbeat.PATIENCE, heartbeat.STORE_S = beats, store_s


def wait_for(
    condition: Callable[[], object],
    timeout_s: float = TIMEOUT_S,
    otherwise: str = "what this rank waits for has not happened",
) -> None:
    """Waits until `condition` returns something true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def freeze(folder: Path) -> None:
    """Stops this process, until :func:`wake`."""
    write(folder / "frozen", os.getpid())
    os.kill(os.getpid(), signal.SIGSTOP)


def wake(folder: Path) -> None:
    os.kill(int((folder / "frozen").read_text()), signal.SIGCONT)


def write(path: Path, pid: int) -> None:
    """Writes a process id in one step."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(str(pid))
    temporary.rename(path)


def stopped(path: Path) -> bool:
    """Returns whether the process whose id is in a file has died or is frozen."""
    return path.exists() and not runs(int(path.read_text()))
