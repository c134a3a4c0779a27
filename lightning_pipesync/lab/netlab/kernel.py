"""What the emulation asks of the kernel: network namespaces, bridges, veth pairs, and token buckets that shape links.

A namespace's name is ``pipesync-PID.START-SERIAL-WHAT``: the owner's process id and the start time of that process (ids
are reused), so that leftovers can be found; a number for each network of that process; and the host or the switch.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pyroute2
from pyroute2 import IPRoute, netns
from pyroute2.netlink.exceptions import NetlinkError

from lightning_pipesync.core.private_names import require
from lightning_pipesync.lab.netlab.network import BURST_S, INTERFACE, LEAST_BURST, LONGEST_MS
from lightning_pipesync.lab.netlab.processes import NAMESPACES, kill

_NAME = re.compile(r"pipesync-(\d+)\.(\d+)-\d+-.+")
LATENCY = f"{LONGEST_MS}ms"
_KERNEL_OPTIONS = {"bridge": "CONFIG_BRIDGE", "veth": "CONFIG_VETH", "tbf": "CONFIG_NET_SCH_TBF"}

# pyroute2 creates a namespace in a new process, for which 2 seconds are too few on a busy machine.
require(pyroute2.config, "default_communicate_timeout")
pyroute2.config.default_communicate_timeout = 30


def name_prefix(serial: int) -> str:
    """Returns the prefix of all names of a network; ``serial`` numbers the networks of this process."""
    return f"pipesync-{os.getpid()}.{_start_of(os.getpid())}-{serial}-"


def create(name: str) -> None:
    """Creates a namespace with its loopback up; RuntimeError if the system does not allow it."""
    try:
        netns.create(name)
        with _inside(name), IPRoute() as route:
            route.link("set", index=1, state="up")
            # Otherwise TCP restarts slowly after a pause between two steps, unlike on long-lived fast links.
            Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle").write_text("0")
    except OSError as error:
        raise RuntimeError(f"Cannot create the network namespace {name}: {error.strerror or error}.") from error


def remove(prefix: str) -> None:
    """Kills all processes in the namespaces whose names begin with ``prefix``, and removes them with their links."""
    names = _names(prefix)
    kill(*names)
    for name in names:
        with suppress(FileNotFoundError):  # Another run removes the same leftovers.
            netns.remove(name)


def remove_leftovers() -> None:
    """Removes the namespaces of processes that have died."""
    for name in _names("pipesync-"):
        match = _NAME.fullmatch(name)
        if match and _start_of(int(match[1])) != int(match[2]):
            remove(name)


def connect_hosts(switch: str, racks: int, uplink: int | None, hosts: Sequence[tuple[str, int, int]]) -> None:
    """Adds a bridge for each rack in the namespace ``switch``, joins several by a core bridge, and connects the hosts.

    ``uplink`` is the bits per second between a rack and the core, each way; None with a single rack. ``hosts`` has the
    namespace of each, the bits per second of its link in the direction to it, and the number of its rack. RuntimeError
    if the kernel lacks bridges, veth pairs or the token bucket.
    """
    with _inside(switch), IPRoute() as route:
        bridges = [_add_bridge(route, f"rack{rack}") for rack in range(racks)]
        if uplink is not None:
            core = _add_bridge(route, "core")
            for rack, bridge in enumerate(bridges):
                _add_veth_pair(route, f"up{rack}", f"down{rack}", switch)
                _shape(route, f"up{rack}", uplink, master=bridge)
                _shape(route, f"down{rack}", uplink, master=core)
        for number, (namespace, rate, rack) in enumerate(hosts):
            _add_veth_pair(route, f"host{number}", INTERFACE, namespace)
            _shape(route, f"host{number}", rate, master=bridges[rack])


def set_up_host(namespace: str, rate: int, address: str, prefix: int) -> None:
    """Sets up a host's interface with the bits per second of its link in the direction from it.

    ``prefix`` is the prefix length of the network of its address. RuntimeError if the kernel lacks the token bucket.
    """
    with _inside(namespace), IPRoute() as route:
        route.addr("add", index=_shape(route, INTERFACE, rate), address=address, prefixlen=prefix)


def burst_bytes(rate: int) -> int:
    """Returns the size of a token bucket in bytes, which may pass at once after a pause.

    At least one packet of the kernel's largest size with the headers of all segments that it becomes, which would have
    to be divided otherwise, and 2 ms at the rate, the period of its timers. More would let whole messages pass at once
    after a pause.
    """
    return max(LEAST_BURST, int(rate / 8 * BURST_S))


@contextmanager
def _inside(name: str) -> Iterator[None]:
    """Moves this thread into a namespace while the block runs; sockets that it opens stay there."""
    netns.pushns(name)
    try:
        yield
    finally:
        netns.popns()


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


def _add_bridge(route: IPRoute, name: str) -> int:
    with _supported("bridge"):
        route.link("add", ifname=name, kind="bridge")
    bridge = _index(route, name)
    route.link("set", index=bridge, state="up")
    return bridge


def _add_veth_pair(route: IPRoute, name: str, peer: str, peer_namespace: str) -> None:
    with _supported("veth"):
        route.link("add", ifname=name, kind="veth", peer={"ifname": peer, "net_ns_fd": peer_namespace})


def _shape(route: IPRoute, name: str, rate: int, **settings: int) -> int:
    """Limits the outgoing rate of an interface to ``rate`` bits per second, sets it up, and returns its index."""
    index = _index(route, name)
    with _supported("tbf"):
        route.tc("add", "tbf", index, handle=0x10000, rate=rate // 8, burst=burst_bytes(rate), latency=LATENCY)
    route.link("set", index=index, state="up", **settings)
    return index


def _index(route: IPRoute, name: str) -> int:
    index: int = route.link_lookup(ifname=name)[0]
    return index


@contextmanager
def _supported(kind: str) -> Iterator[None]:
    """Raises an error that names the kernel option if the kernel does not know ``kind``."""
    try:
        yield
    except NetlinkError as error:
        if error.code in (errno.ENOENT, errno.EOPNOTSUPP):
            raise RuntimeError(
                f"This kernel has no {kind} ({_KERNEL_OPTIONS[kind]}), or its module is not loaded."
            ) from error
        raise RuntimeError(f"The kernel refuses to add a {kind}: {error}.") from error
