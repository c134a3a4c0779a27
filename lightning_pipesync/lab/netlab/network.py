"""A network of hosts with limited bandwidth, as a context manager."""

from __future__ import annotations

import ipaddress
import itertools
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from subprocess import Popen
from types import TracebackType

from lightning_pipesync.core.extras import check_extra
from lightning_pipesync.lab.netlab.faults import check_host
from lightning_pipesync.lab.netlab.processes import NAMESPACES, deferred_signals, raising_signals
from lightning_pipesync.lab.netlab.units import Way, parse_rate, parse_way

#: Reserved for benchmarks of networks (RFC 2544), so that no name server or proxy of the machine has such an address.
_SUBNET = ipaddress.ip_network("198.18.0.0/16")
#: Maximum number of ports of a bridge, rounded down.
_MOST_HOSTS = 1000
_MASTER_PORT = 29500
#: Bits per second, and bytes that may pass at once and that may wait, of a link that loses packets.
_LOSSY = (100_000, 400, 400)
#: Capabilities and their bits in the kernel's masks: links and queues need the first, entering a namespace the second.
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
_serials = itertools.count()


class Network:
    """``with Network(hosts=4, rate="1gbit") as network:`` creates hosts, and removes them at the end.

    Each host is a network namespace, and so is the switch, which is not connected to the machine's own network.
    Leftovers of killed runs are removed first. Within the block SIGTERM and SIGHUP raise SystemExit in the main
    thread, so that the hosts are removed then, too.

    Args:
        hosts: the number of hosts, which are numbered from 0.
        rate: the rate of each host's link, such as ``"1gbit"``, each way, or to the host if there is an ``up_rate``.
        racks: the number of racks, which the hosts are divided into evenly, in order. Each rack has a switch, and a
            core switch connects them.
        uplink: the rate between each rack and the core, each way; None means ``rate``. Only with several racks.
        host_rates: the rates of hosts whose links are slower than others, each way.
        up_rate: the rate of each host's link in the direction from it.
        delay: the time from a host to another one, one way, such as ``"40ms"``; half of a round trip.
        jitter: by how much the delay of a packet is more or less, at most, uniformly distributed. Packets do not
            overtake each other.
        loss: the share of packets of 1500 bytes that are lost between two hosts, such as ``"0.1%"``, independently.
        uplink_delay, uplink_jitter, uplink_loss: the same between two racks, in addition.

    Raises:
        ValueError: a rate, a delay, a share, the racks or a host are invalid.
        RuntimeError: on entering, if this machine lacks a requirement; nothing is left behind.
    """

    def __init__(
        self,
        hosts: int,
        rate: str = "1gbit",
        racks: int = 1,
        uplink: str | None = None,
        host_rates: Mapping[int, str] | None = None,
        *,
        up_rate: str | None = None,
        delay: str | None = None,
        jitter: str | None = None,
        loss: str | None = None,
        uplink_delay: str | None = None,
        uplink_jitter: str | None = None,
        uplink_loss: str | None = None,
    ) -> None:
        if not 1 <= hosts <= _MOST_HOSTS:
            raise ValueError(f"hosts must be between 1 and {_MOST_HOSTS}, got {hosts}.")
        if racks < 1 or hosts % racks:
            raise ValueError(f"racks must divide the {hosts} hosts evenly, got {racks}.")
        between_racks = {"uplink": uplink, "uplink_delay": uplink_delay}
        between_racks |= {"uplink_jitter": uplink_jitter, "uplink_loss": uplink_loss}
        for name, value in between_racks.items():
            if value is not None and racks == 1:
                raise ValueError(f"{name} is the link between racks: it needs racks of 2 or more.")
        self.hosts, self.racks = hosts, racks
        #: Bits per second of each host's link, to it and from it.
        self.rates, self.up_rates = [parse_rate(rate)] * hosts, [parse_rate(up_rate or rate)] * hosts
        for host, slower in (host_rates or {}).items():
            check_host(host, hosts, "host_rates")
            self.rates[host] = parse_rate(slower)
            self.up_rates[host] = self.rates[host] if up_rate is None else min(self.rates[host], self.up_rates[host])
        self._uplink = parse_rate(uplink or rate) if racks > 1 else None
        self._way = parse_way(delay, jitter, loss)
        self._uplink_way = parse_way(uplink_delay, uplink_jitter, uplink_loss, "uplink_")
        #: The program that forwards all packets; None: the kernel does.
        self.forwarder: Popen[bytes] | None = None
        self._prefix = ""
        self._exit = ExitStack()

    def __enter__(self) -> Network:
        check_requirements()
        from lightning_pipesync.lab.netlab import forwarding, kernel

        if self._is_forwarded:
            forwarding.check_devices()
        kernel.remove_leftovers()
        self._prefix = kernel.name_prefix(next(_serials))
        with ExitStack() as undo:
            undo.enter_context(raising_signals())
            undo.callback(self._remove)
            with deferred_signals():
                self._create()
            self._exit = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._exit.__exit__(kind, error, traceback)

    def namespace(self, host: int) -> str:
        """Returns the name of a host's network namespace, for ``ip netns exec``."""
        return f"{self._prefix}host{host}"

    def address(self, host: int) -> str:
        """Returns the IP address of a host."""
        return str(_SUBNET[host + 1])

    def environment(self, host: int) -> dict[str, str]:
        """Returns the variables that ``torchrun`` with one process per host would set."""
        from lightning_pipesync.lab.netlab.kernel import INTERFACE

        return {
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(_MASTER_PORT),  # Every port of a new host is free.
            "WORLD_SIZE": str(self.hosts),
            "RANK": str(host),
            "NODE_RANK": str(host),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "TP_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
            # Otherwise NCCL finds that the hosts are one machine, and bypasses the network.
            "NCCL_HOSTID": self.namespace(host),
        }

    def cut(self, host: int) -> None:
        """Cuts the link of a host."""
        self._set_link(f"host{host}", up=False)

    def mend(self, host: int) -> None:
        """Mends the link of a host."""
        self._set_link(f"host{host}", up=True)

    def is_connected(self, host: int) -> bool:
        """Returns whether the link of a host is in order."""
        from lightning_pipesync.lab.netlab import kernel

        namespace, name = self._ends_of(host)[0]
        return kernel.has_carrier(namespace, name)

    def part(self) -> None:
        """Cuts the first rack off the others."""
        self._set_link("up0", up=False)

    def is_parted(self) -> bool:
        """Returns whether the first rack is cut off."""
        from lightning_pipesync.lab.netlab import kernel

        return not kernel.has_carrier(self._links_of_kernel, "down0")

    def lose_packets(self, host: int) -> None:
        """Makes the link of a host so thin, in both directions, and its queues so short that packets are lost."""
        from lightning_pipesync.lab.netlab import kernel

        for namespace, name in self._ends_of(host):
            kernel.limit_queue(namespace, name, *_LOSSY)

    def lose_no_packets(self, host: int) -> None:
        """Undoes :meth:`lose_packets`."""
        from lightning_pipesync.lab.netlab import kernel

        for (namespace, name), rate in zip(self._ends_of(host), (self.up_rates[host], self.rates[host]), strict=True):
            kernel.widen_queue(namespace, name, rate)

    def packets_lost(self, host: int) -> int:
        """Returns how many packets the queues of a host's link have dropped, in both directions."""
        from lightning_pipesync.lab.netlab import kernel

        return sum(kernel.dropped(namespace, name) for namespace, name in self._ends_of(host))

    @property
    def _switch(self) -> str:
        return f"{self._prefix}switch"

    @property
    def _links_of_kernel(self) -> str:
        """The namespace of the switches; RuntimeError if there are none."""
        if self._is_forwarded:
            raise RuntimeError(
                "A network with delays, jitter or loss has no switch: its links cannot be cut, and their queues not "
                "be limited. Leave out the delays."
            )
        return self._switch

    @property
    def _is_forwarded(self) -> bool:
        return any(way != Way() for way in (self._way, self._uplink_way))

    def _ends_of(self, host: int) -> list[tuple[str, str]]:
        from lightning_pipesync.lab.netlab.kernel import INTERFACE

        return [(self.namespace(host), INTERFACE), (self._links_of_kernel, f"host{host}")]

    def _set_link(self, name: str, up: bool) -> None:
        from lightning_pipesync.lab.netlab import kernel

        kernel.set_link(self._links_of_kernel, name, up)

    def _create(self) -> None:
        from lightning_pipesync.lab.netlab import kernel

        numbers, switch = range(self.hosts), self._switch
        for name in (switch, *map(self.namespace, numbers)):
            kernel.create(name)
        racks = [host * self.racks // self.hosts for host in numbers]
        if self._is_forwarded:
            self._start_forwarder(racks)
        else:
            kernel.add_switches(switch, self.racks, self._uplink)
            kernel.connect_hosts(switch, [*zip(map(self.namespace, numbers), self.rates, racks, strict=True)])
        for host in numbers:
            kernel.set_up_host(self.namespace(host), self.up_rates[host], self.address(host), _SUBNET.prefixlen)

    def _start_forwarder(self, racks: Sequence[int]) -> None:
        from lightning_pipesync.lab.netlab import forwarding, kernel

        settings = {
            "interface": kernel.INTERFACE,
            "namespaces": [str(NAMESPACES / self.namespace(host)) for host in range(self.hosts)],
            "addresses": [self.address(host) for host in range(self.hosts)],
            "racks": racks,
            "rates": [rate / 8 for rate in self.rates],
            "uplink": (self._uplink or 0) / 8,
            "burst_s": kernel.BURST_S,
            "least_burst": kernel.LEAST_BURST,
            "longest_s": kernel.LONGEST_MS / 1e3,
            "way": self._way,
            "uplink_way": self._uplink_way,
        }
        self.forwarder = forwarding.start(self._switch, settings)

    def _remove(self) -> None:
        from lightning_pipesync.lab.netlab import kernel

        with deferred_signals():
            kernel.remove(self._prefix)
            if self.forwarder is not None:
                self.forwarder.wait()


def check_requirements() -> None:
    """Checks that hosts can be emulated here.

    Raises:
        RuntimeError: this is not Linux, lacks capabilities, or is without network namespaces.
        ModuleNotFoundError: pyroute2 is not installed.
    """
    if not sys.platform.startswith("linux"):
        raise RuntimeError(f"A network of hosts can be emulated on Linux only; this is {sys.platform}.")
    check_extra("netlab", "A network of hosts")
    if missing := missing_capabilities():
        raise RuntimeError(
            f"Network namespaces need root, or a user namespace (unshare --user): this process lacks "
            f"{' and '.join(missing)}. Run it with sudo, or in a privileged container."
        )
    if not Path("/proc/self/ns/net").exists():
        raise RuntimeError("This kernel has no network namespaces (CONFIG_NET_NS).")


def missing_capabilities() -> list[str]:
    """Returns the names of the required capabilities that this process lacks."""
    status = Path("/proc/self/status").read_text()
    effective = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:"))
    return [name for name, bit in _CAPABILITIES.items() if not effective >> bit & 1]
