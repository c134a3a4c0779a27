"""What communication costs among hosts that were measured: the data from which steps are predicted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from statistics import median
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from lightning_pipesync.core.codecs import Codec, get_codec
from lightning_pipesync.core.cost import LinkCost

L = TypeVar("L", bound="MeasuredCost")


@dataclass(frozen=True)
class MeasuredCost(LinkCost):
    """A cost that was measured at several sizes, between which it may differ from the line of alpha and beta.

    Small messages, rings and exchanges among all have costs of their own. Among as many ranks as were measured it is as
    measured, in between linear in the logarithm of the size; among others it is the line.
    """

    world_size: int = 0  # among which it was measured
    ratios: Sequence[tuple[float, float]] = ()  # bytes, ascending, and by what factor more than the line was measured

    @classmethod
    def measured(
        cls, num_bytes: Sequence[float], seconds: Sequence[float], world_size: int, halves: int
    ) -> MeasuredCost:
        """Returns the cost with the medians of each size; arguments as of :meth:`LinkCost.fit`."""
        line = LinkCost.fit(num_bytes, seconds, world_size, halves)
        ratios = []
        for size in sorted(set(num_bytes)):
            usual = median(took for one, took in zip(num_bytes, seconds, strict=True) if one == size)
            ratios.append((size, usual / (halves * line.reduce_scatter(size, world_size))))
        return cls(**asdict(line), world_size=world_size, ratios=ratios)

    def reduce_scatter(self, num_bytes: float, world_size: int) -> float:
        """Returns the seconds of half an all-reduce."""
        seconds = super().reduce_scatter(num_bytes, world_size)
        if world_size != self.world_size or not self.ratios:
            return seconds
        sizes, factors = zip(*self.ratios, strict=True)
        return seconds * float(np.interp(math.log(max(1.0, num_bytes)), np.log(sizes), factors))

    def tree_half(self, num_bytes: float, world_size: int, pieces: float = math.inf) -> float:
        """Returns the seconds of a reduce, or of a broadcast, on a double binary tree (DeAR, Section VII-A).

        ceil(log2 P) messages follow each other, and a rank sends and receives N bytes (Sanders et al., "Two-tree
        algorithms for full bandwidth broadcast, reduction and scan", 2009). Of each half of the buffer, which travels
        in ``pieces``, the first one passes all levels of its tree before the next ones keep all links busy.
        """
        if world_size == 1:
            return 0.0
        depth = math.ceil(math.log2(world_size))
        return depth * self.alpha + (1 + (depth - 1) / pieces) * num_bytes * self.beta

    def double_tree(self, num_bytes: float, world_size: int) -> float:
        """Returns the seconds of an all-reduce on a double binary tree, in small pieces: on many ranks far less than a
        ring's.

        So NCCL does, in 2 log2(P) messages and 2 N bytes (S. Jeaugey, "Massively Scale Your Deep Learning Training with
        NCCL 2.4", 2019). Halving and doubling would take about as long.
        """
        return 2 * self.tree_half(num_bytes, world_size)

    def torus_half(self, num_bytes: float, columns: int, rows: int) -> float:
        """Returns the seconds of a reduce-scatter, or of an all-gather, on a 2-D torus: along rows, then columns."""
        return self.reduce_scatter(num_bytes, columns) + self.reduce_scatter(num_bytes / columns, rows)

    def sharded_servers(self, num_bytes: float, world_size: int, servers: int | None = None) -> float:
        """Returns the seconds in which all ranks push N bytes of gradients to servers, then pull as many of weights.

        Each of the first S ranks serves a shard of N / S bytes beside its own work. The most loaded links are theirs:
        (P - 1) N / S bytes come in with the push, and as many go out with the pull. With S = P these are the
        2 N (P - 1) / P bytes of a ring. But the P - 1 messages of a half are under way at once, where those of a ring
        follow each other. So alpha counts once a half, which assumes that it is latency; of what it has of processor
        time for a message, a server spends P - 1 times as much, as in a ring.

        Args:
            num_bytes: N.
            world_size: P.
            servers: S, from 1 to P; None: P.
        """
        servers = world_size if servers is None else servers
        if not 1 <= servers <= world_size:
            raise ValueError(f"servers must be from 1 to the number of ranks, {world_size}, got {servers!r}.")
        if world_size == 1:
            return 0.0
        return 2 * (self.alpha + (world_size - 1) * num_bytes / servers * self.beta)


#: What is so many times as fast as plain TCP has another network.
OTHER_NETWORK = 2


@dataclass(frozen=True)
class BackendCost(MeasuredCost):
    """The cost of the backend's own all-reduce, which among other numbers of ranks takes the algorithm that it chooses.

    By size and number of nodes NCCL chooses between rings and double binary trees (NVIDIA/nccl#754), unless
    ``NCCL_ALGO`` is set. Torch's Gloo always takes a ring (gloo/allreduce.cc). But no method is to gain by a poor
    all-reduce of DDP, which a flat ring is on thousands of hosts: who trains there takes NCCL, or could. So among more
    than ``ring_up_to`` ranks it is the faster of both with Gloo, too.
    """

    ring_up_to: int = 0

    def all_reduce(self, num_bytes: float, world_size: int) -> float:
        """Returns the seconds of an all-reduce: as measured, or of the algorithm that :meth:`chosen` names."""
        if self.chosen(num_bytes, world_size) == "tree":
            return self.double_tree(num_bytes, world_size)
        return super().all_reduce(num_bytes, world_size)

    def chosen(self, num_bytes: float, world_size: int) -> Literal["measured", "ring", "tree"]:
        """Returns the algorithm; ``"measured"``: that which the backend has chosen, of which the time is known."""
        if world_size == self.world_size:
            return "measured"
        tree_is_faster = self.double_tree(num_bytes, world_size) < super().all_reduce(num_bytes, world_size)
        return "tree" if world_size > self.ring_up_to and tree_is_faster else "ring"


@dataclass(frozen=True)
class Cluster:
    """The costs of communication among hosts that are alike, each with one rank, or with a replica in shards.

    Costs are of a rank that exchanges with the same one of each other host, all ranks of the hosts at the same time.
    """

    world_size: int  # the number of hosts
    bandwidth: float  # bytes per second that a rank can send while it receives as many, by plain TCP
    backend: BackendCost  # of the backend's own all-reduce, which DDP uses
    halves: MeasuredCost  # of this package's reduce-scatters and all-gathers, several in a row
    #: Of this package's all-reduce of fp32, by codec, with encoding and decoding; beta is by bytes before encoding.
    all_reduces: Mapping[str, MeasuredCost]
    #: Of what methods have asked to be measured, by its name and codec, with beta as above.
    exchanges: Mapping[str, Mapping[str, MeasuredCost]] = field(default_factory=dict)
    torus: MeasuredCost | None = None  # of the two halves on a torus; None: the ranks are too few, or it is not known
    tree: MeasuredCost | None = None  # of the two halves on a double binary tree; None: as for the torus
    #: Whether this package's halves can be on a tree: not over NCCL.
    has_trees: bool = True
    ranks_per_replica: int = 1  # neighboring ranks of a host among which FSDP2 shards a replica
    #: Whether FSDP2's all-reduce between replicas runs under the backward pass: not on a CPU.
    hsdp_overlaps: bool = False
    latency: float | None = None  # seconds of one way of a message, if it is another one than was measured
    torus_columns: int | None = None  # the ranks of a host, if there are several: a row of a torus

    def seconds_on_wire(self, num_bytes: float, codec: str) -> float:
        """Returns the least seconds of an all-reduce: what its encoded bytes take at the bandwidth."""
        return 2 * (self.world_size - 1) / self.world_size * num_bytes / self._compression(codec) / self.bandwidth

    @property
    def host_bandwidth(self) -> float:
        """Bytes per second of a host's link, which its ranks share."""
        return self.ranks_per_replica * self.bandwidth

    @property
    def other_bandwidth(self) -> float | None:
        """Bytes per second that a rank sends at least in the backend's all-reduce, if over another network than TCP."""
        beta = _most_of_another_network(self.backend, 1 / self.bandwidth)
        return None if beta is None else 1 / beta

    def with_hosts(self, number: int) -> Cluster:
        if number == self.world_size:
            return self

        def changed(link: L, codec: str) -> L:
            return replace(link, beta=link.beta * (self._compression(codec) / compression_of(codec, number)))

        return self._with_links(changed, world_size=number, torus=None, tree=None)

    def with_bandwidth(self, bandwidth: float) -> Cluster:
        """Returns the same hosts with other links, in bytes per second; what the processors do takes as long.

        ``bandwidth`` is that of a host, which its ranks share. What is much faster than plain TCP was measured over
        another network, such as NCCL's: of its links, ``bandwidth`` is taken to be the whole cost of a byte.
        """
        bandwidth /= self.ranks_per_replica

        def changed(link: L, codec: str) -> L:
            compression = self._compression(codec)
            before, after = 1 / (compression * self.bandwidth), 1 / (compression * bandwidth)
            if _most_of_another_network(link, before) is not None:
                return replace(link, beta=after)
            processing = max(0.0, link.beta - before)
            return replace(link, beta=processing + min(link.beta, before) / before * after)

        # A tree sends more bytes than the ring of which alpha and beta are.
        return self._with_links(changed, bandwidth=bandwidth, tree=None)

    def with_latency(self, latency: float, measured: float) -> Cluster:
        """Returns the same hosts with links of another latency; both are the seconds of one way.

        What alpha is more than the measured latency, a message takes as before: the processors' time. Costs are on the
        line of alpha and beta then, as what differed from it differed at the measured latency.
        """

        def changed(link: L, _: str) -> L:
            return replace(link, alpha=max(0.0, link.alpha - measured) + latency, ratios=())

        # On a tree other numbers of messages follow each other than in the ring of which alpha and beta are.
        return self._with_links(changed, latency=latency, torus=None, tree=None)

    def with_errors(self, sign: int) -> Cluster:
        """Returns the cluster with all alphas and betas larger, or smaller, by their standard errors."""

        def changed(link: L, _: str) -> L:
            alpha, beta = link.alpha + sign * _finite(link.alpha_error), link.beta + sign * _finite(link.beta_error)
            return replace(link, alpha=max(0.0, alpha), beta=max(0.0, beta))

        return self._with_links(changed)

    def _compression(self, codec: str) -> float:
        return compression_of(codec, self.world_size)

    def _with_links(self, change: Callable[[L, str], L], **others: Any) -> Cluster:
        """Returns the cluster with other costs; ``change`` returns one, given that before and its codec."""

        def changed(links: Any, codec: str = "none") -> Any:
            if isinstance(links, Mapping):
                return {name: changed(one, name) for name, one in links.items()}
            return links if links is None else change(links, codec)

        names = ("backend", "halves", "all_reduces", "exchanges", "torus", "tree")
        return replace(self, **{**{name: changed(getattr(self, name)) for name in names}, **others})


@cache
def compression_of(codec: str | Codec, world_size: int) -> float:
    """Returns the ratio of the bytes of an all-reduce of fp32 values to those with a codec, of many values.

    Of P ranks each sends 2 (P - 1) / P of the values, or, if the codec's wires are gathered, P - 1 times all of them.
    """
    numel, codec = 2**20, get_codec(codec)
    ratio = 4 * numel / codec.wire_bytes(numel, torch.float32)
    return ratio * 2 / world_size if codec.gathered else ratio


def _most_of_another_network(link: MeasuredCost, on_wire: float) -> float | None:
    """Returns the largest beta that was measured, if it is much less than the seconds of a byte by plain TCP."""
    beta = link.beta + _finite(link.beta_error)
    return beta if 0 < beta < on_wire / OTHER_NETWORK else None


def _finite(error: float) -> float:
    return error if error == error else 0.0  # nan: it was not fitted
