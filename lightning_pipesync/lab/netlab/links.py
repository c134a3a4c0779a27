"""Links from hosts to the bridge of their rack, and from racks to a core bridge, each shaped by a token bucket."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from lightning_pipesync.lab.netlab.namespaces import inside

#: The name of each host's interface.
INTERFACE = "eth0"
#: The longest time of a packet in a queue before it is dropped.
_LATENCY = "100ms"
_KERNEL_OPTIONS = {"bridge": "CONFIG_BRIDGE", "veth": "CONFIG_VETH", "tbf": "CONFIG_NET_SCH_TBF"}


@dataclass(frozen=True)
class HostLink:
    """A host and its link.

    Attributes:
        namespace: the host's network namespace.
        address: the address with the prefix length of its network, ``"198.18.0.1/16"``.
        rate: bits per second, each way.
        rack: the number of the rack.
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
                _add_veth_pair(route, f"up{rack}", f"down{rack}", switch)
                _shape(route, f"up{rack}", uplink, master=bridge)
                _shape(route, f"down{rack}", uplink, master=core)
        for number, host in enumerate(hosts):
            _add_veth_pair(route, f"host{number}", INTERFACE, host.namespace)
            _shape(route, f"host{number}", host.rate, master=bridges[host.rack])
    for host in hosts:
        address, _, length = host.address.partition("/")
        with inside(host.namespace), IPRoute() as route:
            end = _shape(route, INTERFACE, host.rate)
            route.addr("add", index=end, address=address, prefixlen=int(length))


def burst_bytes(rate: int) -> int:
    """Returns the size of a token bucket in bytes, which may pass at once after a pause.

    At least one packet of the kernel's largest size with the headers of all segments that it becomes, which would have
    to be divided otherwise, and 2 ms at the rate, the period of its timers. More would let whole messages pass at once
    after a pause.
    """
    return max(72 * 1024, rate // 8 // 500)


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
        route.tc("add", "tbf", index, handle=0x10000, rate=rate // 8, burst=burst_bytes(rate), latency=_LATENCY)
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
