"""The options that describe the links of an emulated network, which several commands have."""

from __future__ import annotations

from collections.abc import Mapping
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
