"""The cables: hosts to the bridge of their rack, racks to a core bridge, each end shaped by a token bucket."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from lightning_pipesync.netlab.namespaces import inside

#: Name of each host's interface.
INTERFACE = "eth0"
#: How long a packet may wait in a queue before it is dropped.
_LATENCY = "100ms"
_KERNEL_OPTIONS = {"bridge": "CONFIG_BRIDGE", "veth": "CONFIG_VETH", "tbf": "CONFIG_NET_SCH_TBF"}


@dataclass(frozen=True)
class HostLink:
    """A host and its cable.

    Attributes:
        namespace: of the host.
        address: with the length of its network's prefix, ``"198.18.0.1/16"``.
        rate: bits per second, each way.
        rack: number of the rack.
    """

    namespace: str
    address: str
    rate: int
    rack: int


def connect(switch: str, hosts: Sequence[HostLink], racks: int, uplink: int | None) -> None:
    """Connects the hosts through bridges in the namespace ``switch``.

    Args:
        uplink: bits per second between a rack and the core, each way; None with a single rack.

    Raises:
        RuntimeError: the kernel lacks bridges, veth pairs or the token bucket.
    """
    with inside(switch), IPRoute() as route:
        bridges = [_add_bridge(route, f"rack{rack}") for rack in range(racks)]
        if uplink is not None:
            core = _add_bridge(route, "core")
            for rack, bridge in enumerate(bridges):
                _add_cable(route, f"up{rack}", f"down{rack}", switch)
                _plug(route, f"up{rack}", uplink, master=bridge)
                _plug(route, f"down{rack}", uplink, master=core)
        for number, host in enumerate(hosts):
            _add_cable(route, f"host{number}", INTERFACE, host.namespace)
            _plug(route, f"host{number}", host.rate, master=bridges[host.rack])
    for host in hosts:
        address, _, length = host.address.partition("/")
        with inside(host.namespace), IPRoute() as route:
            end = _plug(route, INTERFACE, host.rate)
            route.addr("add", index=end, address=address, prefixlen=int(length))


def burst_bytes(rate: int) -> int:
    """Returns how many bytes may pass a token bucket at once after a pause.

    At least 256 KiB, a few packets as large as the kernel builds them, and 2 ms of the rate, in which its timers fire.
    """
    return max(256 * 1024, rate // 8 // 500)


def _add_bridge(route: IPRoute, name: str) -> int:
    with _supported("bridge"):
        route.link("add", ifname=name, kind="bridge")
    bridge = _index(route, name)
    route.link("set", index=bridge, state="up")
    return bridge


def _add_cable(route: IPRoute, name: str, peer: str, peer_namespace: str) -> None:
    with _supported("veth"):
        route.link("add", ifname=name, kind="veth", peer={"ifname": peer, "net_ns_fd": peer_namespace})


def _plug(route: IPRoute, name: str, rate: int, **settings: int) -> int:
    """Limits what leaves through an interface to ``rate`` bits per second, sets it up, and returns its index."""
    index = _index(route, name)
    with _supported("tbf"):
        route.tc("add", "tbf", index, handle=0x10000, rate=rate // 8, burst=burst_bytes(rate), latency=_LATENCY)
    route.link("set", index=index, state="up", **settings)
    return index


def _index(route: IPRoute, name: str) -> int:
    index: int = route.link_lookup(ifname=name)[0]
    return index


@contextmanager
def _supported(kind: str) -> Iterator[None]:
    """Says which option the kernel lacks, where it answers that it does not know ``kind``."""
    try:
        yield
    except NetlinkError as error:
        if error.code in (errno.ENOENT, errno.EOPNOTSUPP):
            raise RuntimeError(
                f"This kernel has no {kind} ({_KERNEL_OPTIONS[kind]}), or its module is not loaded."
            ) from error
        raise RuntimeError(f"The kernel refuses to add a {kind}: {error}.") from error
