"""What a drill asks of Linux: the state of processes, who inherits them, private mounts, other network namespaces."""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
_MS_REC, _MS_PRIVATE = 0x4000, 1 << 18


def state_of(pid: int) -> str:
    """Returns the state of a process, as in ``/proc/PID/stat``: T, if it is stopped; X, if there is none."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "X"


def children() -> list[int]:
    """Returns the processes whose parent is this one, also those that it has inherited."""
    found = []
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):
            state, parent = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state not in "ZX":
                found.append(int(entry))
    return found


def inherit_orphans() -> None:
    """Makes this process the parent of those that descend from it and lose their parent."""
    _check(_libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")


def die_with_parent() -> None:
    """Has the system kill this process, also if it is stopped, when its parent ends."""
    _check(_libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")


def has_private_mounts() -> bool:
    """Gives this process mounts that no other one sees; returns whether the system allows it."""
    libc = _libc()
    return libc.unshare(_CLONE_NEWNS) == 0 and libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) == 0


def mount_memory(folder: Path, num_bytes: int) -> None:
    """Mounts a file system in memory, of so many bytes."""
    _check(_libc().mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, f"size={num_bytes}".encode()), "mount")


def enter_network(namespace: Path) -> None:
    """Moves this process, which has one thread, into a network namespace."""
    file = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    _check(_libc().setns(file, _CLONE_NEWNET), "setns")
    os.close(file)


def memory_of_this_process() -> int:
    """Returns the bytes of its address space."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(status: int, call: str) -> None:
    if status:
        raise OSError(ctypes.get_errno(), f"{call}: {os.strerror(ctypes.get_errno())}")
