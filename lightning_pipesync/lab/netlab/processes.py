"""The processes of a host: all processes in its network namespace, whatever their parent."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

#: The directory of named network namespaces, the same as of ``ip netns``.
NAMESPACES = Path("/run/netns")
#: The most seconds until a killed process is gone.
_DEATH_S = 10.0


def processes_in(*namespaces: str) -> list[int]:
    """Returns the ids of all processes in the named network namespaces."""
    wanted = set()
    for name in namespaces:
        try:
            wanted.add(_identity(NAMESPACES / name))
        except OSError:  # It has been removed.
            continue
    found = []
    for entry in os.listdir("/proc") if wanted else ():
        if entry.isdecimal():
            try:
                identity = _identity(Path("/proc", entry, "ns", "net"))
            except OSError:  # It has ended.
                continue
            if identity in wanted:
                found.append(int(entry))
    return found


def send(number: signal.Signals, processes: Iterable[int]) -> None:
    """Sends a signal to processes; skips those that have ended."""
    for process in processes:
        try:
            os.kill(process, number)
        except ProcessLookupError:
            continue


def freeze(namespace: str) -> int:
    """Stops all processes of a namespace, also those started meanwhile. Returns their number."""
    stopped: set[int] = set()
    while new := set(processes_in(namespace)) - stopped:
        send(signal.SIGSTOP, new)
        stopped |= new
    return len(stopped)


def kill(*namespaces: str) -> int:
    """Kills all processes of the namespaces and waits until none is left. Returns their number.

    Raises:
        RuntimeError: a process cannot be killed (it waits for a device).
    """
    killed: set[int] = set()
    deadline = time.monotonic() + _DEATH_S
    while processes := processes_in(*namespaces):
        if time.monotonic() > deadline:
            raise RuntimeError(f"Processes {processes} do not end after SIGKILL.")
        send(signal.SIGKILL, processes)
        killed.update(processes)
        time.sleep(0.01)
    return len(killed)


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino
