"""Links of an emulated network that are cut, and that lose packets, with what proves it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pyroute2 import IPRoute, netns

from lightning_pipesync.lab.netlab.kernel import LATENCY, burst_bytes
from lightning_pipesync.lab.netlab.network import INTERFACE, Network

#: Bits per second, and bytes that may pass at once and that may wait, of a link that loses packets.
RATE, BURST, LIMIT = 100_000, 400, 400


class Links:
    """The links of an entered network: those of its hosts, and that of its first rack.

    Raises:
        RuntimeError: the network has delays, jitter or loss, and no switch.
    """

    def __init__(self, network: Network) -> None:
        if network.forwarder is not None:
            raise RuntimeError("A network with delays, jitter or loss has no switch: its links cannot be cut.")
        self._network, self._switch = network, network.namespace(0).removesuffix("host0") + "switch"

    def cut(self, host: int) -> None:
        self._plug(f"host{host}", "down")

    def mend(self, host: int) -> None:
        self._plug(f"host{host}", "up")

    def is_connected(self, host: int) -> bool:
        return _has_carrier(self._network.namespace(host), INTERFACE)

    def part(self) -> None:
        """Cuts the first rack off the others."""
        self._plug("up0", "down")

    def is_parted(self) -> bool:
        return not _has_carrier(self._switch, "down0")

    def lose_packets(self, host: int) -> None:
        """Makes the link of a host so thin, in both directions, and its queues so short that packets are lost."""
        for namespace, name in self._ends_of(host):
            _shape(namespace, name, rate=RATE // 8, burst=BURST, limit=LIMIT)

    def lose_no_packets(self, host: int) -> None:
        """Undoes :meth:`lose_packets`."""
        rates = (self._network.up_rates[host], self._network.rates[host])
        for (namespace, name), rate in zip(self._ends_of(host), rates, strict=True):
            _shape(namespace, name, rate=rate // 8, burst=burst_bytes(rate), latency=LATENCY)

    def packets_lost(self, host: int) -> int:
        """Returns how many packets the queues of a host's link have dropped, in both directions."""
        lost = 0
        for namespace, name in self._ends_of(host):
            with _interface(namespace, name) as (route, index):
                queues = [queue for queue in route.get_qdiscs(index) if queue["index"] == index]
                lost += sum(int(queue.get_attr("TCA_STATS")["drop"]) for queue in queues)
        return lost

    def _ends_of(self, host: int) -> list[tuple[str, str]]:
        return [(self._network.namespace(host), INTERFACE), (self._switch, f"host{host}")]

    def _plug(self, name: str, state: str) -> None:
        """Plugs an interface of the switch in, or pulls it out: its peer keeps its addresses and routes."""
        with _interface(self._switch, name) as (route, index):
            route.link("set", index=index, state=state)


@contextmanager
def _interface(namespace: str, name: str) -> Iterator[tuple[IPRoute, int]]:
    netns.pushns(namespace)
    try:
        with IPRoute() as route:
            yield route, route.link_lookup(ifname=name)[0]
    finally:
        netns.popns()


def _has_carrier(namespace: str, name: str) -> bool:
    """Returns whether an interface is up, and so is its peer."""
    with _interface(namespace, name) as (route, index):
        return bool(route.get_links(index)[0].get_attr("IFLA_OPERSTATE") == "UP")


def _shape(namespace: str, name: str, **settings: int | str) -> None:
    with _interface(namespace, name) as (route, index):
        route.tc("change", "tbf", index, handle=0x10000, **settings)
