"""Measures the network: what collectives and the exchanges of methods cost, and what each pair of hosts reaches."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import fmean, median
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.core.clock import Clock
from lightning_pipesync.lab.bench.bandwidth import JobSockets, measure_bandwidth, receive
from lightning_pipesync.lab.bench.candidates import sgd
from lightning_pipesync.lab.bench.timing import finish_work
from lightning_pipesync.lab.plan.model import EACH_RANK, Replicas
from lightning_pipesync.lab.plan.text import rate
from lightning_pipesync.lab.plan.trials import TIMEOUT_S, gathered
from lightning_pipesync.lab.predictions.cluster import BackendCost, MeasuredCost
from lightning_pipesync.lab.predictions.entry import Exchange
from lightning_pipesync.lab.predictions.registry import lab_of
from lightning_pipesync.methods.method import Method
from lightning_pipesync.training.registry import METHODS

#: The largest size that is measured has from so many to so many bytes, which can be sent in so many seconds.
LEAST_BYTES, MOST_BYTES, LARGEST_S = 2**18, 2**24, 0.25

#: Each size is a fraction of the next one, and there are so many.
FACTOR, NUM_SIZES = 4, 4

#: Minimum and maximum number of operations in a row, and how many times.
LEAST, MOST, ROUNDS = 4, 32, 3

#: Maximum number of ranks of Gloo among which DDP is expected to have a flat ring.
GLOO_RING_UP_TO = 16

#: Of a method's exchange: steps of a measurement, and how many of the largest sizes.
STEPS, NUM_SIZES_OF_EXCHANGES = 3, 3

#: A link is slow with less than this share of the usual bandwidth.
SLOW = 0.7

#: A transfer takes about so many seconds, and has from so many to so many bytes.
TRANSFER_S, LEAST_TRANSFER, MOST_TRANSFER = 0.2, MIB, 16 * MIB

#: Exchanges of one byte.
PINGS = 5

#: Connections that are tried beside a single one, and how many times as much they have to reach to be worth it.
CONNECTIONS, WORTH = 4, 1.3


class Waitable(Protocol):
    """An operation in flight."""

    def wait(self) -> object: ...


def sizes_for(num_bytes: int, bandwidth: float) -> list[int]:
    """Returns the sizes to measure, in bytes, ascending, which at ``bandwidth`` do not take long."""
    largest = min(max(LEAST_BYTES, num_bytes), MOST_BYTES, max(LEAST_BYTES, LARGEST_S * bandwidth))
    return [4 * round(largest / FACTOR**i / 4) for i in reversed(range(NUM_SIZES))]


@dataclass(frozen=True)
class Costs:
    """Measures the costs of operations on flat fp32 buffers of these ``sizes`` in bytes; each is a collective call."""

    sizes: Sequence[int]
    device: torch.device
    replicas: Replicas = EACH_RANK

    def in_a_row(self, start: Callable[[Tensor], Waitable], halves: int) -> MeasuredCost:
        """Measures several operations in a row, as they occur in a step.

        ``start`` starts the operation of a buffer; an all-reduce has 2 ``halves``. The first operation is not counted:
        all ranks begin together, and a network that lets bursts pass has none left.
        """
        clock = Clock(self.device)
        points = []
        for size in [*self.sizes] * ROUNDS:
            number = min(MOST, max(LEAST, max(self.sizes) // size))
            flats = [torch.zeros(size // 4, device=self.device) for _ in range(number)]
            dist.barrier()
            start(flats[0]).wait()
            begin = clock.now()
            for operation in [start(flat) for flat in flats]:
                operation.wait()
            points.append((size, clock.seconds_between(begin, clock.now()) / number))
        return self._cost(points, halves)

    def of_backend(self) -> BackendCost:
        """Measures the backend's all-reduce, which DDP and FSDP2 use."""
        cost = self.in_a_row(partial(dist.all_reduce, group=self.replicas.group, async_op=True), halves=2)
        return BackendCost(**asdict(cost), ring_up_to=GLOO_RING_UP_TO if self.device.type == "cpu" else 0)

    def one_by_one(self, all_reduce: Callable[[Tensor], Waitable]) -> MeasuredCost:
        """Measures all-reduces that begin when the one before has ended, as for whole gradients or weights."""
        clock = Clock(self.device)
        points = []
        for size in self.sizes:
            flat = torch.zeros(size // 4, device=self.device)
            moments = []
            for _ in range(ROUNDS + 2):
                all_reduce(flat).wait()
                moments.append(clock.now())
            points += [(size, clock.seconds_between(*pair)) for pair in pairwise(moments[1:])]
        return self._cost(points)

    def of_exchange(self, method: type[Method], exchange: Exchange) -> dict[str, MeasuredCost]:
        """Measures an exchange that a method has declared, and returns its cost by codec.

        Raises:
            ValueError: the method refuses ``replicas`` of several ranks.
        """
        costs = {codec: self._of_steps(method, of_codec) for codec, of_codec in exchange.settings.items()}
        if not exchange.at_once:
            return costs
        messages = self.replicas.number - 1
        return {
            codec: replace(cost, alpha=messages * cost.alpha, alpha_error=messages * cost.alpha_error, ratios=())
            for codec, cost in costs.items()
        }

    def _of_steps(self, method: Callable[..., Any], settings: Mapping[str, Any]) -> MeasuredCost:
        """Measures steps without those of the optimizer, which count as computation."""
        points = []
        arguments = {**self.replicas.arguments, **settings, "timeout_s": TIMEOUT_S}
        for size in self.sizes[-NUM_SIZES_OF_EXCHANGES:]:
            zeros = partial(torch.zeros, size // 4, device=self.device)
            weights, alone = (nn.Parameter(self.replicas.as_shard(zeros())) for _ in range(2))
            optimizer, sync = sgd([alone]), method(nn.ParameterList([weights]), sgd([weights]), **arguments)
            for _ in range(ROUNDS):
                update = _seconds(optimizer.step, alone)
                dist.barrier()
                took = _seconds(sync.step, weights)
                points.append((size, max(0.1 * took, fmean(gathered(took - update))) / STEPS))
            sync.flush()
            sync.detach()
        return self._cost(points)

    def _cost(self, points: Sequence[tuple[int, float]], halves: int = 2) -> MeasuredCost:
        num_bytes, seconds = zip(*points, strict=True)
        return MeasuredCost.measured(num_bytes, seconds, self.replicas.number, halves)


def _seconds(step: Callable[[], object], weights: nn.Parameter) -> float:
    """Returns the seconds of some steps, after a first one."""
    gradient = torch.zeros_like(weights)
    for taken in range(STEPS + 1):
        if taken == 1:
            finish_work()
            begin = time.perf_counter()
        weights.grad = gradient
        step()
    finish_work()
    return time.perf_counter() - begin


@dataclass(frozen=True)
class Links:
    """What single TCP connections between ranks reach, one pair of a rank at a time, by sender and receiver.

    ``bandwidth`` is in bytes per second. ``latency`` is the seconds of one way: half of a round trip.
    """

    bandwidth: Sequence[Sequence[float]]
    latency: Sequence[Sequence[float]]


def measure_links(bandwidth: float) -> Links:
    """Measures every pair in both directions; a collective call. In each round each rank has one partner.

    ``bandwidth``, about what the network has, determines how much is sent. RuntimeError names a pair that does not
    connect.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    num_bytes = int(min(MOST_TRANSFER, max(LEAST_TRANSFER, bandwidth * TRANSFER_S)))
    speeds, delays = [0.0] * world_size, [0.0] * world_size
    with JobSockets(backlog=world_size) as sockets:
        for partner in partners(rank, world_size):
            dist.barrier()
            if partner is None:
                continue
            try:
                with sockets.accept() if rank < partner else sockets.connect(partner) as connection:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    delays[partner] = _ping(connection, rank < partner)
                    for sender in (min(rank, partner), max(rank, partner)):
                        seconds = _transfer(connection, num_bytes, sends=sender == rank)
                        if sender == rank:
                            speeds[partner] = num_bytes / seconds
            except OSError as error:
                raise RuntimeError(
                    f"Rank {rank} does not reach rank {partner}, at {sockets.addresses[partner]}: {error}."
                ) from error
    return Links(gathered(speeds), gathered(delays))


def partners(rank: int, world_size: int) -> list[int | None]:
    """Returns a rank's partner in each round, in which all meet once; None: it pauses (the circle method)."""
    size = world_size + world_size % 2
    rounds = []
    for round_ in range(size - 1):
        circle = [size - 1, *((round_ + i) % (size - 1) for i in range(size - 1))]
        partner = circle[size - 1 - circle.index(rank)]
        rounds.append(partner if partner < world_size else None)
    return rounds


def outliers(links: Links, names: Sequence[str]) -> list[str]:
    """Returns what is slow, one sentence each: hosts, racks with a thin uplink, single pairs."""
    ranks = range(len(names))
    speed = {(a, b): min(links.bandwidth[a][b], links.bandwidth[b][a]) for a in ranks for b in ranks if a != b}
    best = sorted(speed.values())[-max(1, len(speed) // 4)]  # a thin uplink may make most pairs slow
    slow = {pair for pair, value in speed.items() if value < SLOW * best}
    if not slow:
        return []
    racks = _components([pair for pair in speed if pair not in slow], len(names))
    alone = [rack[0] for rack in racks if len(rack) == 1]
    found = []
    for rank in alone if len(alone) < len(names) else ():
        value = median(speed[rank, other] for other in ranks if other != rank and other not in alone)
        found.append(
            f"{names[rank]}: {rate(value)} to and from the others, which have {rate(best)}. Check its cable, its "
            "switch port, and what else runs there."
        )
    rest = [rack for rack in racks if len(rack) > 1]
    if len(rest) > 1:
        value = median(speed[a, b] for a in rest[0] for b in rest[1])
        listed = "; ".join(", ".join(map(str, rack)) for rack in rest)
        found.append(
            f"The ranks are in {len(rest)} racks ({listed}): {rate(value)} between them, {rate(best)} within. "
            + _advice_for(rest, len(names))
        )
    pairs = sorted((a, b) for a, b in slow if a < b and any(a in rack and b in rack for rack in rest))
    found += [f"{names[a]} and {names[b]}: {rate(speed[a, b])}, where others have {rate(best)}." for a, b in pairs]
    return found


def several_connections(bandwidth: float, ranks_per_replica: int = 1) -> list[str]:
    """Returns what to set if several TCP connections carry more than one carries; a collective call."""
    several = measure_bandwidth(connections=CONNECTIONS, stride=ranks_per_replica)
    if several < WORTH * bandwidth:
        return []
    return [
        f"One TCP connection carries {rate(bandwidth)}, {CONNECTIONS} carry {rate(several)}: let Gloo open several, "
        "as docs/launching.md says, GLOO_SOCKET_IFNAME=eth0,eth0 with your interface."
    ]


def _advice_for(racks: Sequence[Sequence[int]], num_ranks: int) -> str:
    """Returns what to do about thin uplinks: strategies that take neighbors together need racks of neighbors."""
    if [rank for rack in racks for rank in rack] != list(range(num_ranks)) or len(set(map(len, racks))) > 1:
        return (
            "What was made for that takes as many ranks of each rack, numbered rack by rack: see docs/topologies.md, "
            "and ranks_per_replica."
        )
    found = ((method, lab_of(name).settings_for_racks(len(racks[0]))) for name, method in METHODS.items())
    made = (
        f"{method.__name__}Strategy({', '.join(f'{key}={value!r}' for key, value in settings.items())})"
        for method, settings in found
        if settings
    )
    return f"Made for that, and not run here: {', '.join(made)}."


def _components(pairs: Sequence[tuple[int, int]], number: int) -> list[list[int]]:
    """Returns the numbers that pairs connect, each set in ascending order."""
    group = list(range(number))
    for a, b in pairs:
        old, new = max(group[a], group[b]), min(group[a], group[b])
        group = [new if one == old else one for one in group]
    return [[one for one in range(number) if group[one] == of] for of in sorted(set(group))]


def _ping(connection: socket.socket, begins: bool) -> float:
    seconds = []
    for _ in range(PINGS):
        start = time.perf_counter()
        if begins:
            connection.sendall(b"?")
            connection.recv(1)
        else:
            connection.recv(1)
            connection.sendall(b"!")
        seconds.append((time.perf_counter() - start) / 2)
    return median(seconds)


def _transfer(connection: socket.socket, num_bytes: int, sends: bool) -> float:
    """Returns the seconds until all bytes have arrived, which the receiver tells."""
    start = time.perf_counter()
    if sends:
        connection.sendall(bytes(num_bytes))
        connection.recv(1)
    else:
        receive(connection, bytearray(num_bytes))
        connection.sendall(b"!")
    return time.perf_counter() - start
