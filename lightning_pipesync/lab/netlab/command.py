"""``pipesync netlab``, and the options that describe the links of an emulated network, which several commands have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_pipesync.lab.netlab.network import Network


@dataclass(frozen=True, kw_only=True)
class LinkOptions:
    """The links of an emulated network.

    Attributes:
        rate: Of each host's link in an emulated network, e.g. 1gbit. Without it the ranks talk over loopback.
        up_rate: Of each host's link in the direction from the host, e.g. 20mbit, if it differs.
        delay: From a host to another one, one way, e.g. 40ms: a round trip takes twice as long.
        jitter: By how much the delay of a packet is more or less, at most, e.g. 4ms. Packets do not overtake.
        loss: Share of the packets of 1500 bytes that are lost on their way from a host to another one, e.g. 0.1%.
        racks: Number of racks, or sites, in the emulated network.
        uplink: Rate of each rack's link to the others, e.g. 200mbit.
        uplink_delay: From a rack to another one, one way, in addition to delay.
        uplink_jitter: By how much the uplink_delay of a packet is more or less, at most.
        uplink_loss: Share of the packets that are lost between racks, in addition to loss.
    """

    rate: str | None = None
    up_rate: str | None = None
    delay: str | None = None
    jitter: str | None = None
    loss: str | None = None
    racks: int = 1
    uplink: str | None = None
    uplink_delay: str | None = None
    uplink_jitter: str | None = None
    uplink_loss: str | None = None

    def beside_rate(self) -> dict[str, Any]:
        """Returns the options that are given, without the rate."""
        values = {field.name: getattr(self, field.name) for field in fields(LinkOptions) if field.name != "rate"}
        return {name: value for name, value in values.items() if value != getattr(LinkOptions, name)}

    def listed_beside_rate(self) -> str:
        """Returns them as errors name settings, such as ``racks=2, delay='40ms'``; nothing if there are none."""
        return ", ".join(f"{name}={value!r}" for name, value in self.beside_rate().items())

    def in_words(self) -> str | None:
        """Returns the options that are given, such as ``200mbit, delay 40ms``; None without a rate."""
        if self.rate is None:
            return None
        return ", ".join([self.rate, *(f"{name} {value}" for name, value in self.beside_rate().items())])

    def network(self, hosts: int, host_rates: Mapping[int, str] | None = None) -> Network:
        """Returns the network; ValueError if an option is wrong, or if there is no rate."""
        if self.rate is None:
            raise ValueError(f"{self.listed_beside_rate()} is for an emulated network: give its rate, too.")
        from lightning_pipesync.lab.netlab.network import Network

        return Network(hosts, self.rate, host_rates=host_rates, **self.beside_rate())


@dataclass(frozen=True, kw_only=True)
class Netlab(LinkOptions):
    """Runs a multi-node job on hosts of a slow network, emulated on this machine: pipesync netlab ... -- COMMAND.

    Needs Linux, and root or a kernel that lets users create namespaces. The exit status is the worst of
    the hosts', where signal n counts as 128 + n, or 124 after a timeout.

    Attributes:
        hosts: How many hosts there are, numbered from 0.
        rate: Of each host's link in each direction, such as 200mbit or 1gbit.
        slow: HOST:SHARE% for a slow CPU (3:50%), HOST:RATE for a slow link (3:200mbit). May be given again.
        kill: HOST@TIME, such as 2@10s: kill all processes of the host then. May be given again.
        freeze: HOST@TIME, such as 1@5s: stop all processes of the host then, for good. May be given again.
        timeout: After which the job is ended, such as 90s or 5min.
        command: What every host runs. Write it after two dashes instead, as in -- python train.py.
    """

    hosts: int
    rate: str = "1gbit"
    slow: Sequence[str] = ()
    kill: Sequence[str] = ()
    freeze: Sequence[str] = ()
    timeout: str | None = None
    command: Sequence[str] = ()

    def run(self) -> int:
        """Runs the job and returns the exit status.

        Raises:
            ValueError: an option is wrong; nothing was started.
        """
        from lightning_pipesync.lab.netlab.faults import Fault, Freeze, Kill, parse_events, parse_slow
        from lightning_pipesync.lab.netlab.job import check_job, run_job
        from lightning_pipesync.lab.netlab.units import parse_seconds

        slow_hosts, host_rates = parse_slow(self.slow)
        faults: list[Fault] = [*slow_hosts, *parse_events(Kill, self.kill), *parse_events(Freeze, self.freeze)]
        timeout_s = None if self.timeout is None else parse_seconds(self.timeout)
        network = self.network(self.hosts, host_rates)
        check_job(self.hosts, self.command, faults, timeout_s)
        with network:
            return run_job(network, self.command, faults=faults, timeout_s=timeout_s)
