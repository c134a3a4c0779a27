"""Collectives in simulated time: the messages of this package's exchanges, over links that the ranks of a host share.

The exchanges themselves say which messages they post and await, and in which order: they run once on each rank over a
process group that only writes this down. Their order does not depend on time, so that it can be replayed on any links.

[Note: links]
A message starts once its sender has posted it and the receiver's notice has arrived, as over Gloo. It waits until the
messages before it have left its host, and arrives after those before it have, each at the bandwidth of the link: first
come, first served. The switch between hosts is no bottleneck. Messages between ranks of a host use none of its link. A
rank then spends some time of its processor on each message that it has waited for, one after the other.

[Note: one host for all]
In a ring, and all-to-all, all hosts do the same at the same time. So one of them is simulated: what it sends to the
next host is what it gets from the one before. The seconds are a line over the number of ranks that have slices of one
size, once the window of hops is full, so that rings of thousands of ranks follow from two of them; those of a tree are
a line over its depth, with pieces of one size.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_pipesync.core.buckets import ALIGNMENT, shard_of
from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.core.comm.gloo import GlooExchange
from lightning_pipesync.core.comm.hops import BufferPool, in_pieces, ring
from lightning_pipesync.core.comm.messages import Messages
from lightning_pipesync.core.comm.torus import Torus
from lightning_pipesync.core.comm.tree import DoubleTree, TreeExchange, piece_bytes

#: Of more ranks a ring's seconds are on the line through those of half as many as this, and of this; of more than twice
#: as many hosts as this a tree's on that through those of so many, and of twice as many.
MOST_RANKS, TREE_HOSTS = 64, 8

#: Of a backend's tree: minimum bytes of a piece; the largest size that is simulated, beyond which seconds are a line.
LEAST_PIECE, LARGEST = 2**15, 2**24

NONE = get_codec("none")

#: Of a watch, exchanges that cannot fail use this.
_WATCH: Any = SimpleNamespace(timeout=None, waits={})

#: What a rank does: post a receive or a send (to the peer so many ranks further, with a tag, of so many bytes) or wait
#: for one, by its number.
Action = tuple[Literal["receive", "send", "await"], int, int, int]


@dataclass(frozen=True)
class Links:
    """What messages cost: of hosts, bytes per second each way and seconds one way; the same within a host."""

    bandwidth: float
    latency: float = 25e-6
    processor: float = 25e-6  # seconds of a rank for a message
    bandwidth_within: float = 25e9  # of a rank
    latency_within: float = 5e-6


@dataclass(frozen=True)
class Group:
    """Ranks that run a collective: ``per_host`` neighbors on each host, beside which ``alike`` - 1 such groups run."""

    number: int
    per_host: int = 1
    alike: int = 1


class Recorder:
    """Stands for a process group, of which it writes down the messages of one rank."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self.actions: list[Action] = []

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> SimpleNamespace:
        return self._post("receive", tensors[0], peer, tag)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> SimpleNamespace:
        return self._post("send", tensors[0], peer, tag)

    def _post(self, what: Literal["receive", "send"], tensor: Tensor, peer: int, tag: int) -> SimpleNamespace:
        number = len(self.actions)
        self.actions.append((what, (peer - self._rank) % self._size, tag, tensor.nbytes))
        return SimpleNamespace(wait=lambda _: self.actions.append(("await", number, 0, 0)))


@dataclass(frozen=True)
class Halves:
    """Starts ``number`` halves of an all-reduce at once, of ``kinds`` in turns, then waits for each.

    ``piece``: bytes of a piece on a tree; None: flat.
    """

    num_bytes: int
    number: int = 1
    kinds: Sequence[str] = ("reduce_scatter", "all_gather")
    piece: int | None = None

    def __call__(self, group: Any) -> None:
        exchange = GlooExchange(group, _WATCH) if self.piece is None else TreeInPieces(group, self.piece)
        waits = []
        for index in range(self.number):
            flat, kind = torch.empty(self.num_bytes // 4), self.kinds[index % len(self.kinds)]
            if kind == "reduce_scatter":
                waits.append(exchange.reduce_scatter(flat, NONE, True, None))
            else:
                waits.append(exchange.all_gather(flat, NONE, None))
        for wait in waits:
            wait()


@dataclass(frozen=True)
class RingAllReduce:
    """A ring for any size, as backends have it."""

    num_bytes: int

    def __call__(self, group: Any) -> None:
        messages, flat, size = Messages(group, 0, _WATCH), torch.empty(self.num_bytes // 4), group.size()
        slices = [shard_of(flat, rank, size) for rank in range(size)]
        for tag, (first, adds) in enumerate([((group.rank() - 1) % size, True), (group.rank(), False)]):
            ring(messages.tagged(tag), slices, first, BufferPool(), adds=adds).finish()


class TreeInPieces(TreeExchange):
    """A tree of few ranks with the pieces of one of many."""

    def __init__(self, group: Any, piece: int) -> None:
        super().__init__(DoubleTree(group.size()), group, _WATCH)
        self._piece = piece

    def _pieces(self, values: Tensor) -> Sequence[Tensor]:
        return in_pieces(values, self._piece)


@cache
def actions_of(program: Halves | RingAllReduce, rank: int, size: int) -> Sequence[Action]:
    """Returns what a rank does in a program on a group of this size."""
    group = Recorder(rank, size)
    with torch.device("meta"):  # tensors without memory
        program(group)
    return group.actions


@dataclass(slots=True)
class Message:
    sender: int
    receiver: int
    crosses: bool  # from one host to another
    num_bytes: int = 0
    order: tuple[int, int] = (0, 0)  # of messages at one moment: the number of the action, the place in the host
    sent: float | None = None  # when it was posted
    expected: float | None = None  # when its receive was posted
    left: float | None = None  # when all of it has left its host
    arrived: float | None = None
    waiting: list[int] = field(default_factory=list)  # the ranks that wait for it


class Replay:
    """Runs the actions of all ranks, or of those of one host that stands for all, see the notes above.

    Args:
        actions: of each rank of a group; or of one that stands for all.
    """

    def __init__(self, links: Links, group: Group, actions: Sequence[Sequence[Action]]) -> None:
        self._links, self._group = links, group
        self._period = group.number if len(actions) > 1 else group.per_host  # the number of ranks that are simulated
        self._messages: dict[tuple[int, ...], Message] = {}
        self._events: list[tuple[float, tuple[int, int], int, Message, bool]] = []
        number = self._period * group.alike
        self._programs = [self._bound(rank, actions[rank % len(actions)]) for rank in range(number)]
        self._next, self._now = [0] * number, [0.0] * number
        self._free: dict[tuple[str, bool, int], float] = {}  # when each end of a link is
        self._pushed = count()

    def seconds(self) -> float:
        """Returns when the last rank ends."""
        for rank in range(len(self._programs)):
            self._run(rank)
        while self._events:
            time, _, _, message, arrives = heapq.heappop(self._events)
            if arrives:
                self._arrive(message, time)
            else:
                self._leave(message, time)
        assert all(done == len(program) for done, program in zip(self._next, self._programs, strict=True))
        return max(self._now)

    def _bound(self, place: int, actions: Sequence[Action]) -> list[tuple[str, Message]]:
        """Returns the actions of a rank with their messages: those of one sender, way and tag keep their order."""
        group, period = self._group, self._period
        beside, rank = divmod(place, period)
        posted: list[Message] = []
        counts: Counter[tuple[Any, ...]] = Counter()
        bound: list[tuple[str, Message]] = []
        kinds: list[str] = []
        for number, (what, way, tag, num_bytes) in enumerate(actions):
            if what == "await":
                bound.append((f"await {kinds[way]}", posted[way]))
                kinds.append(what)
                posted.append(posted[way])
                continue
            source = rank if what == "send" else (rank + way) % period
            ahead = way if what == "send" else -way % group.number
            counts[what, source, ahead, tag] += 1
            key = (beside, source, ahead, tag, counts[what, source, ahead, tag])
            message = self._messages.get(key)
            if message is None:
                target = source + ahead
                crosses = source // group.per_host != target % group.number // group.per_host
                message = Message(beside * period + source, beside * period + target % period, crosses)
                self._messages[key] = message
            message.num_bytes = num_bytes
            if what == "send":
                message.order = number, beside * group.per_host + rank % group.per_host
            kinds.append(what)
            posted.append(message)
            bound.append((what, message))
        return bound

    def _run(self, rank: int) -> None:
        """Goes on with a rank's actions until it has to wait."""
        program, now = self._programs[rank], self._now[rank]
        while self._next[rank] < len(program):
            what, message = program[self._next[rank]]
            if what == "send":
                message.sent = now
            elif what == "receive":
                message.expected = now
            else:
                end = message.arrived if what == "await receive" else message.left
                if end is None:
                    message.waiting.append(rank)
                    break
                now = max(now, end) + (self._links.processor if what == "await receive" else 0.0)
            if what in ("send", "receive") and message.sent is not None and message.expected is not None:
                self._push(max(message.sent, message.expected + self._latency(message)), message, arrives=False)
            self._next[rank] += 1
        self._now[rank] = now

    def _leave(self, message: Message, time: float) -> None:
        start, message.left = self._occupy("out", message.sender, message, time)
        self._push(start + self._latency(message), message, arrives=True)
        self._wake(message)

    def _arrive(self, message: Message, time: float) -> None:
        _, message.arrived = self._occupy("in", message.receiver, message, time)
        self._wake(message)

    def _occupy(self, end: str, rank: int, message: Message, time: float) -> tuple[float, float]:
        """Returns when a message begins and ends to pass an end of a link, of its rank's host or within that."""
        crosses = message.crosses
        place = (end, crosses, rank % self._period // self._group.per_host if crosses else rank)
        begin = max(time, self._free.get(place, 0.0))
        rate = self._links.bandwidth if crosses else self._links.bandwidth_within
        self._free[place] = begin + message.num_bytes / rate
        return begin, self._free[place]

    def _wake(self, message: Message) -> None:
        ranks, message.waiting = message.waiting, []
        for rank in ranks:
            self._run(rank)

    def _latency(self, message: Message) -> float:
        return self._links.latency if message.crosses else self._links.latency_within

    def _push(self, time: float, message: Message, *, arrives: bool) -> None:
        heapq.heappush(self._events, (time, message.order, next(self._pushed), message, arrives))


@cache
def seconds_of(links: Links, group: Group, program: Halves | RingAllReduce, alike: bool) -> float:
    """Returns the seconds of a program; ``alike``: it is the same on all ranks, so that one host is simulated."""
    ranks = (0,) if alike else range(group.number)
    return Replay(links, group, [actions_of(program, rank, group.number) for rank in ranks]).seconds()


@dataclass(frozen=True)
class Collectives:
    """The seconds of collectives among hosts that are alike, each with so many ranks: see [Note: one host for all]."""

    links: Links
    hosts: int
    per_host: int = 1

    @property
    def world_size(self) -> int:
        return self.hosts * self.per_host

    def half(self, topology: str, num_bytes: float, number: int = 1, columns: int | None = None) -> float:
        """Returns the seconds of ``number`` halves in turns that start at once, the first one a reduce-scatter.

        ``columns`` are those of a torus; None: as square as possible.
        """
        factor = 4 if topology == "tree" else 2
        return self._between(lambda size: self._half(topology, size, number, columns), num_bytes, factor)

    def all_reduce(self, num_bytes: float, algorithm: Literal["halves", "ring", "tree"]) -> float:
        """Returns the seconds of an all-reduce: of this package's flat halves, or of a backend's.

        A backend's tree, in pieces that suit it, is of hosts, within which a ring does its part.
        """
        if algorithm == "halves":
            return 2 * self.half("flat", num_bytes)
        ranks = Group(self.world_size if algorithm == "ring" else self.per_host, self.per_host)
        in_ring = self._between(lambda size: self._alike(ranks, size, None), num_bytes)
        return (
            in_ring
            if algorithm == "ring"
            else in_ring + 2 * self._between(self._on_backends_tree, num_bytes, 4, LARGEST)
        )

    def _on_backends_tree(self, num_bytes: int) -> float:
        """Returns the seconds of half an all-reduce in the smallest pieces that keep links busier than processors."""
        busy = 2 * self.links.processor * self.links.bandwidth
        return self._on_tree(self.hosts, 1, num_bytes, max(LEAST_PIECE, 1 << round(math.log2(busy))), 1)

    def _between(
        self, seconds: Callable[[int], float], num_bytes: float, factor: int = 2, largest: float = math.inf
    ) -> float:
        """Returns the seconds for a size, on the line through those of the powers of ``factor`` below and above it."""
        lower = 2**12
        while factor * lower <= num_bytes and factor * lower < largest:
            lower *= factor
        below, above = seconds(lower), seconds(factor * lower)
        return below + (num_bytes - lower) / ((factor - 1) * lower) * (above - below)

    def _half(self, topology: str, num_bytes: int, number: int, columns: int | None) -> float:
        if topology == "tree":
            piece = piece_bytes(num_bytes // 2, self.world_size)
            return self._on_tree(self.world_size, self.per_host, num_bytes, piece, number)
        if topology == "flat":
            return self._alike(Group(self.world_size, self.per_host), num_bytes, number)
        torus = Torus(self.world_size, columns)
        if torus.columns % self.per_host:
            raise ValueError(f"Rows of {torus.columns} ranks do not hold whole hosts of {self.per_host}.")
        # All ranks of a host are in a row, and each in a column of its own.
        row, column = Group(torus.columns, self.per_host), Group(torus.rows, alike=self.per_host)
        return self._alike(row, num_bytes, number) + number * self._alike(column, num_bytes // torus.columns, 1)

    def _alike(self, group: Group, num_bytes: int, number: int | None) -> float:
        """Returns the seconds of halves, or of a ring if ``number`` is None, among a group that is simulated on a host.

        Of many ranks they are on the line through two smaller groups with slices of this size.
        """
        slice_bytes = -(-num_bytes // group.number // ALIGNMENT) * ALIGNMENT

        def seconds(size: int) -> float:
            program = RingAllReduce(size * slice_bytes) if number is None else Halves(size * slice_bytes, number)
            return seconds_of(self.links, replace(group, number=size), program, alike=True)

        if group.number <= MOST_RANKS:
            return seconds(group.number) if group.number > 1 else 0.0
        half, most = seconds(MOST_RANKS // 2), seconds(MOST_RANKS)
        return most + (group.number - MOST_RANKS) / (MOST_RANKS / 2) * (most - half)

    def _on_tree(self, ranks: int, per_host: int, num_bytes: int, piece: int, number: int) -> float:
        """Returns the seconds of halves on a tree; of many ranks they are on the line through two smaller trees."""

        def seconds(size: int) -> float:
            program = Halves(num_bytes, number, piece=piece)
            return seconds_of(self.links, Group(size, per_host), program, alike=False)

        few = TREE_HOSTS * per_host
        if ranks <= 2 * few:
            return seconds(ranks)
        return seconds(2 * few) + math.ceil(math.log2(ranks / (2 * few))) * (seconds(2 * few) - seconds(few))
