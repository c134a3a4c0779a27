"""A network of hosts with limited bandwidth, as a context manager; and what it needs of this machine."""

from __future__ import annotations

import ipaddress
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from lightning_pipesync.core.extras import check_extra
from lightning_pipesync.lab.netlab import forwarder
from lightning_pipesync.lab.netlab.command import LinkOptions
from lightning_pipesync.lab.netlab.faults import check_host
from lightning_pipesync.lab.netlab.processes import NAMESPACES, deferred_signals, inside, raising_signals
from lightning_pipesync.lab.netlab.units import Way, parse_rate, parse_way

#: Reserved for benchmarks of networks (RFC 2544), so that no name server or proxy of the machine has such an address.
_SUBNET = ipaddress.ip_network("198.18.0.0/16")
#: Maximum number of ports of a bridge, rounded down.
_MOST_HOSTS = 1000
_MASTER_PORT = 29500
#: The name of each host's interface.
INTERFACE = "eth0"
#: The longest time in ms of a packet in a queue before it is dropped.
LONGEST_MS = 100
#: A token bucket has at least so many bytes, and those of so many seconds at its rate.
LEAST_BURST, BURST_S = 72 * 1024, 0.002
#: Capabilities and their bits in the kernel's masks: links and queues need the first, entering a namespace the second.
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
#: What runs a command with the capabilities in a user namespace. The named network namespaces are in /run, which is the
#: machine's: the command gets an empty one.
IN_USER_NAMESPACE = ["unshare", "--user", "--map-root-user", "--net", "--mount"]
IN_USER_NAMESPACE += ["sh", "-c", 'mount -t tmpfs none /run && exec "$@"', "sh"]
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
        links: further fields of :class:`LinkOptions`: ``up_rate``, ``delay``, ``jitter``, ``loss``, ``uplink_delay``,
            ``uplink_jitter`` and ``uplink_loss``. Delays are one way; jitter is uniformly distributed, and packets do
            not overtake each other; losses are independent, of packets of 1500 bytes.

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
        **links: Any,
    ) -> None:
        given = LinkOptions(rate=rate, racks=racks, uplink=uplink, **links)
        if not 1 <= hosts <= _MOST_HOSTS:
            raise ValueError(f"hosts must be between 1 and {_MOST_HOSTS}, got {hosts}.")
        if racks < 1 or hosts % racks:
            raise ValueError(f"racks must divide the {hosts} hosts evenly, got {racks}.")
        for name in given.beside_rate() if racks == 1 else ():
            if name.startswith("uplink"):
                raise ValueError(f"{name} is the link between racks: it needs racks of 2 or more.")
        self.hosts, self.racks = hosts, racks
        #: Bits per second of each host's link, to it and from it.
        self.rates, self.up_rates = [parse_rate(rate)] * hosts, [parse_rate(given.up_rate or rate)] * hosts
        for host, slower in (host_rates or {}).items():
            check_host(host, hosts, "host_rates")
            self.rates[host] = parse_rate(slower)
            up_rate = self.rates[host] if given.up_rate is None else self.up_rates[host]
            self.up_rates[host] = min(self.rates[host], up_rate)
        self._uplink = parse_rate(uplink or rate) if racks > 1 else None
        self._way = parse_way(given.delay, given.jitter, given.loss)
        self._uplink_way = parse_way(given.uplink_delay, given.uplink_jitter, given.uplink_loss, "uplink_")
        #: The program that forwards all packets; None: the kernel does.
        self.forwarder: subprocess.Popen[bytes] | None = None
        self._prefix = ""
        self._exit = ExitStack()

    def __enter__(self) -> Network:
        check_requirements()
        from lightning_pipesync.lab.netlab import kernel

        if self._is_forwarded:
            check_devices()
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

    @property
    def _switch(self) -> str:
        return f"{self._prefix}switch"

    @property
    def _is_forwarded(self) -> bool:
        return any(way != Way() for way in (self._way, self._uplink_way))

    def _create(self) -> None:
        from lightning_pipesync.lab.netlab import kernel

        numbers, switch = range(self.hosts), self._switch
        for name in (switch, *map(self.namespace, numbers)):
            kernel.create(name)
        racks = [host * self.racks // self.hosts for host in numbers]
        if self._is_forwarded:
            self._start_forwarder(racks)
        else:
            hosts = [*zip(map(self.namespace, numbers), self.rates, racks, strict=True)]
            kernel.connect_hosts(switch, self.racks, self._uplink, hosts)
        for host in numbers:
            kernel.set_up_host(self.namespace(host), self.up_rates[host], self.address(host), _SUBNET.prefixlen)

    def _start_forwarder(self, racks: Sequence[int]) -> None:
        """Starts the program, and waits until all hosts have an interface; RuntimeError if the kernel refuses one."""
        settings = {
            "interface": INTERFACE,
            "namespaces": [str(NAMESPACES / self.namespace(host)) for host in range(self.hosts)],
            "addresses": [self.address(host) for host in range(self.hosts)],
            "racks": racks,
            "rates": [rate / 8 for rate in self.rates],
            "uplink": (self._uplink or 0) / 8,
            "burst_s": BURST_S,
            "least_burst": LEAST_BURST,
            "longest_s": LONGEST_MS / 1e3,
            "way": self._way,
            "uplink_way": self._uplink_way,
        }
        # It dies with this process; Ctrl-C interrupts this process only, which ends it.
        words = inside(self._switch, [sys.executable, "-I", "-S", forwarder.__file__])
        self.forwarder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert self.forwarder.stdin is not None
        assert self.forwarder.stdout is not None
        with self.forwarder.stdin as pipe, self.forwarder.stdout as output:
            pipe.write(json.dumps(settings).encode())
            pipe.close()
            said = output.readline().decode().strip()
        if said != forwarder.READY:
            self.forwarder.kill()
            raise RuntimeError(f"The forwarder of packets does not start: {said or 'it says nothing'}.")

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


def check_devices() -> None:
    """Raises RuntimeError, which names what is missing, if no TUN device can be made here."""
    try:
        os.close(os.open(forwarder.DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        raise RuntimeError(
            f"Delays, jitter and loss need TUN devices (CONFIG_TUN), and this process cannot open {forwarder.DEVICE}: "
            f"{error.strerror}. A container needs --device {forwarder.DEVICE}."
        ) from error


def enter_user_namespace(command: Sequence[str] | None = None) -> None:
    """Replaces this process by one that has the capabilities for a network of hosts, if it lacks them.

    Returns, with nothing changed, if this process has them, or may not create a user namespace: then
    :class:`~lightning_pipesync.lab.netlab.Network` says what is missing.

    Args:
        command: what the new process runs; by default what this process was started with.
    """
    if not sys.platform.startswith("linux") or not missing_capabilities():
        return
    try:
        allowed = subprocess.run([*IN_USER_NAMESPACE, "true"], capture_output=True, timeout=10).returncode == 0
    except (OSError, subprocess.TimeoutExpired):  # There is no such program.
        return
    if allowed:
        sys.stdout.flush()
        sys.stderr.flush()
        os.execvp(IN_USER_NAMESPACE[0], [*IN_USER_NAMESPACE, *(command or [sys.executable, *sys.orig_argv[1:]])])
