"""``python forwarder.py < NETWORK``: forwards the packets of hosts, late, in part, and no faster than links allow.

Each host's interface is a TUN device, whose packets this program reads, and writes to the device of the host that they
are for. It needs no netem queue, which many kernels lack, and is exact where that is not: TCP hands over bundles of up
to 64 KiB, as to a network card that divides them, and of a bundle just the packets are lost that are to be lost.

A standalone program, which does not import the package: its priority is high, and it should be small. The network is
JSON, see :class:`Network`; it prints ``ready`` once all interfaces are there, and runs until it is killed.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import json
import math
import os
import random
import select
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

#: What it prints once all interfaces are there.
READY = "ready"
#: Where TUN devices are made.
DEVICE = "/dev/net/tun"

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x01, 0x02

#: Before each packet (virtio_net_hdr): flags, type of the bundle, bytes of headers, payload of each packet of the
#: bundle, where the checksum begins that is left to do, and where it belongs.
_BUNDLE = struct.Struct("=BBHHHH")
_TCPV4 = 1
_WITH_ECN = 0x80
_FIN_OR_PSH, _CWR = 0x09, 0x80
_LARGEST = 2**16 + _BUNDLE.size
#: Packets that are read from a host before it is another one's turn.
_AT_ONCE = 16


@dataclass
class Link:
    """A direction of a link: a token bucket, like the kernel's, and a queue."""

    rate: float  #: bytes per second
    burst: float  #: bytes that pass at once after a pause
    longest_s: float  #: of a packet in the queue; the rest is dropped
    _full: float = -math.inf  # when the bucket was, or will be, full

    def leaves(self, now: float, num_bytes: int) -> float | None:
        """Returns when a packet that arrives ``now`` leaves; None: it is dropped."""
        full = max(now, self._full) + num_bytes / self.rate
        waits = full - now - self.burst / self.rate
        if waits > self.longest_s:
            return None
        self._full = full
        return now + max(0.0, waits)


@dataclass
class Way:
    """A direction of a way between two places: packets arrive late, do not overtake each other, and some are lost."""

    delay_s: float = 0.0
    jitter_s: float = 0.0  #: the most by which a packet's delay differs from ``delay_s``, uniformly distributed
    loss: float = 0.0  #: share of packets, less than 1
    random: Callable[[], float] = random.random  #: uniformly distributed in [0, 1)
    _last: float = -math.inf
    _until_loss: int = -1

    def arrives(self, now: float) -> float:
        """Returns when a packet arrives that leaves ``now``."""
        jitter = self.jitter_s * (2 * self.random() - 1) if self.jitter_s else 0.0
        self._last = max(self._last, now + self.delay_s + jitter)
        return self._last

    def lost_of(self, number: int) -> list[int]:
        """Returns which of the next ``number`` packets are lost, in ascending order."""
        if not self.loss:
            return []
        if self._until_loss < 0:
            self._until_loss = self._draw()
        lost = []
        while self._until_loss < number:
            lost.append(self._until_loss)
            self._until_loss += 1 + self._draw()
        self._until_loss -= number
        return lost

    def _draw(self) -> int:
        """Returns how many packets pass before the next one that is lost."""
        return int(math.log(1 - self.random()) / math.log(1 - self.loss))


class Packet:
    """A packet, or a bundle of several of one TCP connection, behind its ``virtio_net_hdr``."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        _, kind, _, self._each, self._checksum, _ = _BUNDLE.unpack_from(data)
        #: How many packets it is on the wire, and how many bytes.
        self.number, self.num_bytes = 1, len(data) - _BUNDLE.size
        if kind & ~_WITH_ECN == _TCPV4 and self._each:
            headers = self._headers
            self.number = max(1, -(-(self.num_bytes - headers) // self._each))
            self.num_bytes += (self.number - 1) * headers

    @property
    def receiver(self) -> bytes | None:
        """The IPv4 address that it is for; None: it is no packet of IPv4."""
        ip = _BUNDLE.size
        return self.data[ip + 16 : ip + 20] if len(self.data) >= ip + 20 and self.data[ip] >> 4 == 4 else None

    @property
    def _headers(self) -> int:
        return self._checksum + (self.data[_BUNDLE.size + self._checksum + 12] >> 4) * 4

    def without(self, lost: Sequence[int]) -> Iterator[Packet]:
        """Yields what is left of it without some of its packets, by number in ascending order."""
        if not lost:
            yield self
            return
        begins = [0, *(one + 1 for one in lost)]
        for begin, end in zip(begins, [*lost, self.number], strict=True):
            if begin < end:
                yield self._part(begin, end)

    def _part(self, begin: int, end: int) -> Packet:
        """Returns a bundle of its packets from ``begin`` to before ``end``."""
        ip, tcp, headers = _BUNDLE.size, _BUNDLE.size + self._checksum, _BUNDLE.size + self._headers
        payload = self.data[headers + begin * self._each : headers + end * self._each]
        flags, kind, length, each, start, offset = _BUNDLE.unpack_from(self.data)
        part = bytearray(self.data[:headers])
        if len(payload) <= each:
            kind, each = 0, 0
        _BUNDLE.pack_into(part, 0, flags, kind, length, each, start, offset)
        length, identity = struct.unpack_from("!HH", part, ip + 2)
        (sequence,) = struct.unpack_from("!I", part, tcp + 4)
        total = headers - ip + len(payload)
        struct.pack_into("!HH", part, ip + 2, total, (identity + begin) % 2**16)
        struct.pack_into("!I", part, tcp + 4, (sequence + begin * self._each) % 2**32)
        part[tcp + 13] &= ~((_CWR if begin else 0) | (_FIN_OR_PSH if end < self.number else 0)) & 0xFF
        struct.pack_into("!H", part, ip + 10, 0)
        struct.pack_into("!H", part, ip + 10, ~_sum_of(part[ip:tcp]) & 0xFFFF)
        # The rest of the checksum is left to whoever needs it, as the kernel has left it.
        pseudo_header = bytes(part[ip + 12 : ip + 20]) + struct.pack("!HH", part[ip + 9], total - (tcp - ip))
        struct.pack_into("!H", part, tcp + 16, _sum_of(pseudo_header))
        return Packet(bytes(part + payload))


def _sum_of(data: bytes | bytearray) -> int:
    """Returns the sum of 16-bit words of the internet's checksum (RFC 1071), of an even number of bytes."""
    total = sum(word for (word,) in struct.iter_unpack("!H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


class Network:
    """Links and ways between hosts, and the packets that are under way.

    Args:
        racks: the number of each host's rack.
        rates: bytes per second of the link to each host. The link from a host is shaped by its interface.
        uplink: bytes per second between each rack and the others, in each direction; 0 with a single rack.
        burst_s, least_burst: a link lets the bytes of so many seconds, and at least so many, pass at once.
        longest_s: see :class:`Link`.
        way, uplink_way: what a :class:`Way` between two hosts has, and in addition one between two racks.
        deliver: called with the number of a host and what it gets.
    """

    def __init__(
        self,
        racks: Sequence[int],
        rates: Sequence[float],
        uplink: float,
        burst_s: float,
        least_burst: int,
        longest_s: float,
        way: tuple[float, float, float],
        uplink_way: tuple[float, float, float],
        deliver: Callable[[int, bytes], object],
    ) -> None:
        def link(rate: float) -> Link:
            return Link(rate, max(least_burst, rate * burst_s), longest_s)

        self._racks, self._way, self._uplink_way, self._deliver = racks, way, uplink_way, deliver
        self._to_hosts = [link(rate) for rate in rates]
        self._uplinks = [(link(uplink), link(uplink)) for _ in range(max(racks) + 1 if uplink else 0)]
        self._paths: dict[tuple[int, int], list[Link | Way]] = {}
        self._under_way: list[tuple[float, int, Packet, int, int, int]] = []
        self._order = itertools.count()

    def send(self, sender: int, receiver: int, packet: Packet, now: float) -> None:
        """Takes a packet that has left its sender's link ``now``."""
        self.go_on(now)  # of those before it, which it may not overtake
        self._go_on(now, packet, sender, receiver, 0)

    def next_s(self, now: float) -> float | None:
        """Returns the seconds until a packet reaches its next place; None: no packet is under way."""
        return max(0.0, self._under_way[0][0] - now) if self._under_way else None

    def go_on(self, now: float) -> None:
        """Moves all packets on that have reached a place by ``now``."""
        while self._under_way and self._under_way[0][0] <= now:
            moment, _, packet, sender, receiver, place = heapq.heappop(self._under_way)
            self._go_on(moment, packet, sender, receiver, place)

    def _go_on(self, now: float, packet: Packet, sender: int, receiver: int, place: int) -> None:
        """Moves a packet on from a place of its path as far as it gets without waiting."""
        path = self._path(sender, receiver)
        for number in range(place, len(path)):
            step = path[number]
            if isinstance(step, Link):
                moment = step.leaves(now, packet.num_bytes)
                if moment is None:
                    return
            else:
                if lost := step.lost_of(packet.number):
                    for part in packet.without(lost):
                        self._wait(step.arrives(now), part, sender, receiver, number + 1)
                    return
                moment = step.arrives(now)
            if moment > now:
                self._wait(moment, packet, sender, receiver, number + 1)
                return
        self._deliver(receiver, packet.data)

    def _wait(self, moment: float, packet: Packet, sender: int, receiver: int, place: int) -> None:
        heapq.heappush(self._under_way, (moment, next(self._order), packet, sender, receiver, place))

    def _path(self, sender: int, receiver: int) -> list[Link | Way]:
        path = self._paths.get((sender, receiver))
        if path is None:
            racks = self._racks[sender], self._racks[receiver]
            path = self._paths[sender, receiver] = [Way(*self._way), self._to_hosts[receiver]]
            if racks[0] != racks[1]:
                path[:0] = [self._uplinks[racks[0]][0], Way(*self._uplink_way), self._uplinks[racks[1]][1]]
        return path


def open_interface(name: str) -> int:
    """Returns a TUN device of the network namespace of this thread; OSError if the kernel refuses it."""
    device = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR))
        fcntl.ioctl(device, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
    except OSError:
        os.close(device)
        raise
    return device


def forward(devices: Sequence[int], addresses: Sequence[bytes], network: Network) -> None:
    """Forwards packets for ever."""
    hosts = {address: number for number, address in enumerate(addresses)}
    numbers = {device: number for number, device in enumerate(devices)}
    ready = select.epoll()
    for device in devices:
        ready.register(device, select.EPOLLIN)
    while True:
        # A timeout is in whole milliseconds, rounded up: packets are late by one at most, and never early.
        timeout = network.next_s(time.monotonic())
        events = ready.poll(timeout)
        network.go_on(time.monotonic())
        for device, _ in events:
            for data in _packets_of(device):
                packet = Packet(data)
                receiver = hosts.get(packet.receiver or b"")
                if receiver is not None:
                    network.send(numbers[device], receiver, packet, time.monotonic())


def _packets_of(device: int) -> Iterator[bytes]:
    with suppress(BlockingIOError):
        for _ in range(_AT_ONCE):
            yield os.read(device, _LARGEST)


def main() -> None:
    """Does not return."""
    settings = json.load(sys.stdin)
    libc = ctypes.CDLL(None, use_errno=True)
    own = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    devices = []

    def enter(namespace: int) -> None:
        if libc.setns(namespace, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")

    for path in settings.pop("namespaces"):
        namespace = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        enter(namespace)
        os.close(namespace)
        try:
            devices.append(open_interface(settings["interface"]))
        except OSError as error:
            print(f"{DEVICE}: {error.strerror}", flush=True)
            sys.exit(1)
    enter(own)  # Who is in a host's namespace is one of its processes.

    def deliver(host: int, data: bytes) -> None:
        # OSError: its interface is down, as that of a host that is being set up or removed.
        with suppress(OSError):
            os.write(devices[host], data)

    del settings["interface"]
    addresses = [bytes(map(int, address.split("."))) for address in settings.pop("addresses")]
    network = Network(**settings, deliver=deliver)
    with suppress(PermissionError):  # It would wait for its turn behind processes that compute.
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    print(READY, flush=True)
    forward(devices, addresses, network)


if __name__ == "__main__":
    main()
