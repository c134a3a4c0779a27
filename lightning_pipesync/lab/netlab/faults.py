"""Faults to inject into the hosts of a job."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar, Union

from lightning_pipesync.lab.netlab.units import parse_rate, parse_seconds, parse_share


@dataclass(frozen=True)
class Slow:
    """A slow CPU: the processes of a host run for a share of the time, and are stopped for the rest."""

    host: int  #: from 0
    share: float  #: of the time in which they run, more than 0 and less than 1

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ValueError(f"share must be more than 0 and less than 1, got {self.share}.")


@dataclass(frozen=True)
class Kill:
    """SIGKILL for all processes of a host."""

    host: int  #: from 0
    after_s: float  #: seconds from the start of the job


@dataclass(frozen=True)
class Freeze:
    """SIGSTOP for all processes of a host, without a SIGCONT."""

    host: int  #: from 0
    after_s: float  #: seconds from the start of the job


Fault = Union[Slow, Kill, Freeze]
Event = TypeVar("Event", Kill, Freeze)


def check_faults(faults: Iterable[Fault], num_hosts: int) -> None:
    """Raises ValueError if a fault names an unknown host, or if two faults slow the same one."""
    slowed = set()
    for fault in faults:
        check_host(fault.host, num_hosts, type(fault).__name__.lower())
        if isinstance(fault, Slow):
            if fault.host in slowed:
                raise ValueError(f"slow: host {fault.host} is named twice.")
            slowed.add(fault.host)


def check_host(host: int, num_hosts: int, where: str) -> None:
    """Raises ValueError if there is no such host; ``where`` names the setting."""
    if host not in range(num_hosts):
        raise ValueError(f"{where}: there is no host {host}. The {num_hosts} hosts are numbered from 0.")


def parse_events(kind: type[Event], texts: Iterable[str]) -> list[Event]:
    """Parses ``"HOST@SECONDS"``, as in ``"2@10s"``; ValueError if malformed."""
    hosts = (_parse_host(text, "@", kind.__name__.lower(), "2@10s") for text in texts)
    return [kind(host, parse_seconds(value)) for host, value in hosts]


def parse_slow(texts: Iterable[str]) -> tuple[list[Slow], dict[int, str]]:
    """Parses ``"HOST:SHARE%"`` into hosts with a slow CPU, and ``"HOST:RATE"`` into rates of slow links."""
    slow: list[Slow] = []
    rates: dict[int, str] = {}
    for text in texts:
        host, value = _parse_host(text, ":", "slow", "3:50% or 3:200mbit")
        if value.endswith("%"):
            slow.append(Slow(host, parse_share(value)))
        elif host in rates:
            raise ValueError(f"slow: the link of host {host} is named twice.")
        else:
            parse_rate(value)
            rates[host] = value
    return slow, rates


def _parse_host(text: str, separator: str, where: str, example: str) -> tuple[int, str]:
    host, found, value = text.partition(separator)
    if not found or not host.isdecimal():
        raise ValueError(f"{where}: {text!r} names no host: write HOST{separator}VALUE, as in {example}.")
    return int(host), value
