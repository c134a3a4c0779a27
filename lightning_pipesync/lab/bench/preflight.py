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
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_pipesync.lab.bench.job_sockets import own_address

#: The request that returns the address of an interface (Linux, netdevice(7)).
_SIOCGIFADDR = 0x8915

LOOPBACK = "lo"


@dataclass(frozen=True)
class HostFacts:
    """What a rank knows of its host.

    Attributes:
        rank: the rank.
        host: its name.
        address: at which other hosts reach it: that of the interface towards rank 0's host.
        interface: the name of that one.
        mtu: its largest packet, in bytes; None if unknown.
        backend_interface: the name of the one that Gloo uses.
        nccl_interfaces: what ``NCCL_SOCKET_IFNAME`` says, which may be nothing.
        cores: processors that the process may use.
        threads: of the process, for computation.
        versions: of Python and packages.
    """

    rank: int
    host: str
    address: str
    interface: str
    mtu: int | None
    backend_interface: str
    nccl_interfaces: str
    cores: int
    threads: int
    versions: dict[str, str]

    @property
    def name(self) -> str:
        """Rank, host and address, for people."""
        return f"rank {self.rank} ({self.host}, {self.address})"


def exchange_facts(store: dist.Store, rank: int, world_size: int) -> list[HostFacts]:
    """Returns the facts of all ranks, before there is a process group: a wrong interface makes that wait in vain.

    Raises:
        ValueError: on all ranks: Gloo cannot reach other hosts; the message names them and the way out.
        RuntimeError: a rank does not come.
    """
    store.set(f"pipesync/facts/{rank}", json.dumps(asdict(own_facts(rank))))
    facts = [HostFacts(**json.loads(store.get(f"pipesync/facts/{one}"))) for one in range(world_size)]
    if len({one.address for one in facts}) > 1:
        lost = [one for one in facts if one.backend_interface == LOOPBACK]
        if lost:
            raise ValueError("\n".join(map(_other_interface, lost)))
    return facts


def own_facts(rank: int) -> HostFacts:
    """Returns the facts of this process, a rank."""
    addresses = dict(_addresses())
    address = own_address()
    interface = next((name for name, own in addresses.items() if own == address), "unknown")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    mtu = None
    with suppress(OSError, ValueError):
        mtu = int(Path(f"/sys/class/net/{interface}/mtu").read_text())
    return HostFacts(
        rank=rank,
        host=socket.gethostname(),
        address=address,
        interface=interface,
        mtu=mtu,
        backend_interface=_backend_interface(addresses),
        nccl_interfaces=os.environ.get("NCCL_SOCKET_IFNAME", ""),
        cores=cores,
        threads=int(os.environ.get("OMP_NUM_THREADS", "0") or 0) or torch.get_num_threads(),
        versions={
            "Python": platform.python_version(),
            "torch": torch.__version__,
            "lightning-pipesync": version("lightning-pipesync"),
        },
    )


def findings(facts: Sequence[HostFacts]) -> list[str]:
    """Returns what is wrong, a sentence each that names the host, the value and the way out."""
    found = [_other_interface(one) for one in facts if one.backend_interface != one.interface]
    found += [
        f"{one.name}: NCCL_SOCKET_IFNAME={one.nccl_interfaces} leaves out {one.interface}, the way to the other hosts. "
        f"Set NCCL_SOCKET_IFNAME={one.interface} there, unless NCCL has another network."
        for one in facts
        if not _nccl_takes(one.nccl_interfaces, one.interface)
    ]
    found += _unlike(facts, "an MTU of", lambda one: str(one.mtu), "Set the same on all hosts and switches.")
    for package in facts[0].versions:
        found += _unlike(facts, package, lambda one: one.versions[package], "Install the same everywhere.")  # noqa: B023
    addresses = Counter(one.address for one in facts)
    if 1 < len(addresses) < len(facts):
        address, ranks = addresses.most_common(1)[0]
        found.append(f"{ranks} ranks have the address {address}, whose link they share: start one on each host.")
    for host, ranks in Counter(one.host for one in facts).items():
        of_host = [one for one in facts if one.host == host]
        threads, cores = sum(one.threads for one in of_host), max(one.cores for one in of_host)
        if threads > max(cores, ranks):
            found.append(
                f"Host {host}: {ranks} ranks with {threads} threads in all on {cores} cores. Set OMP_NUM_THREADS="
                f"{max(1, cores // ranks)}."
            )
        elif ranks > cores:
            found.append(f"Host {host}: {ranks} ranks on {cores} cores, which they share.")
    return found


def _other_interface(one: HostFacts) -> str:
    return (
        f"{one.name}: Gloo uses the interface {one.backend_interface}, and the way to the other hosts is "
        f"{one.interface}. Set GLOO_SOCKET_IFNAME={one.interface} there."
    )


def _unlike(facts: Sequence[HostFacts], what: str, value_of: Callable[[HostFacts], str], way_out: str) -> list[str]:
    """Returns who has another value than most."""
    usual = Counter(map(value_of, facts)).most_common(1)[0][0]
    return [
        f"{one.name}: {what} {value_of(one)}, and most hosts have {usual}. {way_out}"
        for one in facts
        if value_of(one) != usual
    ]


def _nccl_takes(chosen: str, interface: str) -> bool:
    """Returns whether NCCL may use an interface: one that begins with a name, is one (=), or is none of them (^)."""
    names = chosen.lstrip("^=").split(",")
    named = any(interface == name if "=" in chosen[:2] else interface.startswith(name) for name in names)
    return named != chosen.startswith("^") or not chosen


def _backend_interface(addresses: dict[str, str]) -> str:
    """Returns the interface that Gloo uses: the first of its variable, or that of the host's name."""
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if chosen:
        return chosen.split(",")[0]
    with suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
        return next((name for name, own in addresses.items() if own == address), f"of {address}")
    return "unknown"


def _addresses() -> Iterator[tuple[str, str]]:
    """Yields each interface with its IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                yield name, socket.inet_ntoa(answer[20:24])
