"""The processes of a host, which are all in its network namespace, and the signals that end this process."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from lightning_pipesync.lab.netlab import enter

#: The directory of named network namespaces, the same as of ``ip netns``.
NAMESPACES = Path("/run/netns")
#: Maximum seconds until a killed process is gone.
_DEATH_S = 10.0


def inside(namespace: str, command: Sequence[str], addresses: Sequence[str] = ()) -> list[str]:
    """Returns the command that becomes another in a named network namespace, and dies with this process.

    There ``addresses`` have the names host0, host1 and so on.
    """
    enters = [sys.executable, "-I", "-S", enter.__file__, str(NAMESPACES / namespace), str(os.getpid())]
    return [*enters, ",".join(addresses), *command]


def processes_in(*namespaces: str) -> list[int]:
    """Returns the ids of all processes in the named network namespaces."""
    wanted, found = set(), []
    for name in namespaces:
        with suppress(OSError):  # It has been removed.
            wanted.add(_identity(NAMESPACES / name))
    for entry in filter(str.isdecimal, os.listdir("/proc") if wanted else ()):
        with suppress(OSError):  # It has ended.
            if _identity(Path("/proc", entry, "ns", "net")) in wanted:
                found.append(int(entry))
    return found


def send(number: signal.Signals, processes: Iterable[int]) -> None:
    """Sends a signal to processes; skips those that have ended."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def freeze(namespace: str) -> int:
    """Stops all processes of a namespace, also those started meanwhile. Returns their number."""
    stopped: set[int] = set()
    while new := set(processes_in(namespace)) - stopped:
        send(signal.SIGSTOP, new)
        stopped |= new
    return len(stopped)


def kill(*namespaces: str) -> int:
    """Kills all processes of the namespaces, waits until none is left, and returns their number.

    RuntimeError if a process cannot be killed, because it waits for a device.
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


@contextmanager
def raising_signals() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP into ``SystemExit(128 + number)`` while the block runs, as Python does for SIGINT."""
    with _handling(_raise, (signal.SIGTERM, signal.SIGHUP)):
        yield


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Defers SIGINT, SIGTERM and SIGHUP while the block runs; raises the first of them at its end."""
    arrived: list[int] = []
    try:
        with _handling(lambda number, frame: arrived.append(number), (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
            yield
    finally:
        if arrived:
            signal.raise_signal(arrived[0])


def _raise(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], Any], numbers: tuple[signal.Signals, ...]) -> Iterator[None]:
    """Installs a handler, in the main thread only, as Python requires. An ignored signal stays ignored."""
    before = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    before[number] = signal.signal(number, handler)
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
