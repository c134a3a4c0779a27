"""Network namespaces with names that identify their owner, so that left-overs can be found.

A name is ``pipesync-PID.START-SERIAL-WHAT``: the owner's process id, the start time of that process (ids are reused), a
number for each network of that process, and the host or the switch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyroute2
from pyroute2 import netns

from lightning_pipesync.core.private_names import require
from lightning_pipesync.lab.netlab.processes import NAMESPACES, kill

_NAME = re.compile(r"pipesync-(\d+)\.(\d+)-\d+-.+")
# pyroute2 creates a namespace in a new process, for which 2 seconds are too few on a busy machine.
require(pyroute2.config, "default_communicate_timeout")
pyroute2.config.default_communicate_timeout = 30


def name_prefix(serial: int) -> str:
    """Returns the prefix of all names of a network; ``serial`` numbers the networks of this process."""
    return f"pipesync-{os.getpid()}.{_start_of(os.getpid())}-{serial}-"


def create(name: str) -> None:
    """Creates a namespace with its loopback up.

    Raises:
        RuntimeError: the system does not allow it.
    """
    try:
        netns.create(name)
        with inside(name), pyroute2.IPRoute() as route:
            route.link("set", index=1, state="up")
            # Otherwise TCP restarts slowly after a pause between two steps, unlike on long-lived fast links.
            Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle").write_text("0")
    except OSError as error:
        raise RuntimeError(f"Cannot create the network namespace {name}: {error.strerror or error}.") from error


@contextmanager
def inside(name: str) -> Iterator[None]:
    """Moves this thread into a namespace while the block runs; sockets that it opens stay there."""
    netns.pushns(name)
    try:
        yield
    finally:
        netns.popns()


def remove(prefix: str) -> None:
    """Kills all processes in the namespaces whose names begin with ``prefix``, and removes them with their links."""
    names = _names(prefix)
    kill(*names)
    for name in names:
        try:
            netns.remove(name)
        except FileNotFoundError:  # Another run removes the same left-overs.
            continue


def remove_leftovers() -> None:
    """Removes the namespaces of processes that have died."""
    for name in _names("pipesync-"):
        match = _NAME.fullmatch(name)
        if match and _start_of(int(match[1])) != int(match[2]):
            remove(name)


def _names(prefix: str) -> list[str]:
    return sorted(path.name for path in NAMESPACES.glob(f"{prefix}*"))


def _start_of(process: int) -> int | None:
    """Returns the start time of a process, in clock ticks since boot; None if there is no such process."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    # The second field is the program's name in parentheses, which may contain any characters.
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])
