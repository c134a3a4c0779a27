"""What is wrong with hosts before anything is measured: interfaces, versions, threads."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_pipesync.lab.bench.bandwidth import address_of_this_host
from lightning_pipesync.lab.bench.tables import version_of

#: The request that returns the address of an interface (Linux, netdevice(7)).
_SIOCGIFADDR = 0x8915

LOOPBACK = "lo"
#: Of an address that is not the first of any interface.
UNKNOWN = "unknown"


@dataclass(frozen=True)
class HostFacts:
    """What a rank knows of its host."""

    rank: int
    host: str
    address: str  # at which other hosts reach it: that of ``interface``
    interface: str  # the network interface towards rank 0's host
    mtu: int | None  # the largest packet of the interface, in bytes; None if unknown
    backend_interface: str  # the interface that Gloo uses
    nccl_interfaces: str  # NCCL_SOCKET_IFNAME, which may be empty
    cores: int  # processors that the process may use
    threads: int  # of the process, for computation
    versions: dict[str, str]  # of Python and packages

    @property
    def name(self) -> str:
        """Rank, host and address, for people."""
        return f"rank {self.rank} ({self.host}, {self.address})"

    @property
    def other_interface(self) -> str:
        """What to do if Gloo uses another interface."""
        leads = self.interface if self.interface != UNKNOWN else f"that with the address {self.address}"
        chosen = f"={self.interface}" if self.interface != UNKNOWN else " to its name"
        return (
            f"{self.name}: Gloo uses the interface {self.backend_interface}, but {leads} leads to the other hosts. Set "
            f"GLOO_SOCKET_IFNAME{chosen} there."
        )


def exchange_facts(store: dist.Store, rank: int, world_size: int) -> list[HostFacts]:
    """Returns the facts of all ranks, before there is a process group, which a wrong interface would block.

    Raises:
        ValueError: on all ranks, if Gloo cannot reach other hosts.
    """
    store.set(f"pipesync/facts/{rank}", json.dumps(asdict(facts_of_this_host(rank))))
    facts = [HostFacts(**json.loads(store.get(f"pipesync/facts/{other}"))) for other in range(world_size)]
    lost = [host.other_interface for host in facts if host.backend_interface == LOOPBACK]
    if lost and len({host.address for host in facts}) > 1:
        raise ValueError("\n".join(lost))
    return facts


def facts_of_this_host(rank: int) -> HostFacts:
    """Returns the facts of this process, a rank."""
    addresses, address = dict(_addresses()), address_of_this_host()
    interface = next((name for name, found in addresses.items() if found == address), UNKNOWN)
    mtu = None
    with suppress(OSError, ValueError):
        mtu = int(Path(f"/sys/class/net/{interface}/mtu").read_text())
    packages = {"torch": torch.__version__, "lightning-pipesync": version_of("lightning-pipesync") or "not installed"}
    return HostFacts(
        rank=rank,
        host=socket.gethostname(),
        address=address,
        interface=interface,
        mtu=mtu,
        backend_interface=_backend_interface(addresses),
        nccl_interfaces=os.environ.get("NCCL_SOCKET_IFNAME", ""),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=int(os.environ.get("OMP_NUM_THREADS", "0") or 0) or torch.get_num_threads(),
        versions={"Python": platform.python_version(), **packages},
    )


def findings(facts: Sequence[HostFacts]) -> list[str]:
    """Returns what is wrong, one sentence each, with the host, the value and the way out."""
    known = [host for host in facts if host.interface != UNKNOWN]
    found = [host.other_interface for host in known if host.backend_interface != host.interface]
    found += [
        f"{host.name}: NCCL_SOCKET_IFNAME={host.nccl_interfaces} excludes {host.interface}, which leads to the other "
        f"hosts. Set NCCL_SOCKET_IFNAME={host.interface} there, unless NCCL has another network."
        for host in known
        if not _nccl_takes(host.nccl_interfaces, host.interface)
    ]
    found += _unlike(facts, "an MTU of", lambda host: str(host.mtu), "Set the same on all hosts and switches.")
    for package in facts[0].versions:
        found += _unlike(facts, package, lambda host: host.versions[package], "Install the same everywhere.")  # noqa: B023
    addresses = Counter(host.address for host in facts)
    if 1 < len(addresses) < len(facts):
        address, ranks = addresses.most_common(1)[0]
        found.append(f"{ranks} ranks have the address {address}, whose link they share: start one on each host.")
    for name, ranks in Counter(host.host for host in facts).items():
        on_host = [host for host in facts if host.host == name]
        threads, cores = sum(host.threads for host in on_host), max(host.cores for host in on_host)
        if threads > max(cores, ranks):
            found.append(
                f"Host {name}: {ranks} ranks with {threads} threads in all on {cores} cores. Set OMP_NUM_THREADS="
                f"{max(1, cores // ranks)}."
            )
        elif ranks > cores:
            found.append(f"Host {name}: {ranks} ranks on {cores} cores, which they share.")
    return found


def _unlike(facts: Sequence[HostFacts], what: str, value_of: Callable[[HostFacts], str], way_out: str) -> list[str]:
    """Returns who has another value than most."""
    usual = Counter(map(value_of, facts)).most_common(1)[0][0]
    unusual = [host for host in facts if value_of(host) != usual]
    return [f"{host.name}: {what} {value_of(host)}, but most hosts have {usual}. {way_out}" for host in unusual]


def _nccl_takes(chosen: str, interface: str) -> bool:
    """Returns whether NCCL may use an interface: names are prefixes, or whole after =, or excluded after ^."""
    names = chosen.lstrip("^=").split(",")
    named = any(interface == name if "=" in chosen[:2] else interface.startswith(name) for name in names)
    return named != chosen.startswith("^") or not chosen


def _backend_interface(addresses: dict[str, str]) -> str:
    """Returns the interface that Gloo uses: the first of its variable, or that of the host's name.

    Debian and Ubuntu give the name an address of the loopback, 127.0.1.1. Without any Gloo takes the loopback, too.
    """
    if chosen := os.environ.get("GLOO_SOCKET_IFNAME", ""):
        return chosen.split(",")[0]
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return LOOPBACK
    if ip_address(address).is_loopback:
        return LOOPBACK
    return next((name for name, found in addresses.items() if found == address), f"of {address}")


def _addresses() -> Iterator[tuple[str, str]]:
    """Yields each interface with its IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                yield name, socket.inet_ntoa(answer[20:24])
