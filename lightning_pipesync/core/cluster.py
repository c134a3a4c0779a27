"""What communication costs among hosts that were measured: the data from which steps are predicted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from statistics import median
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import torch

from lightning_pipesync.core.codecs import Codec, get_codec
from lightning_pipesync.core.cost import LinkCost


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


#: What is so many times as fast as plain TCP has another network.
OTHER_NETWORK = 2

#: Of an all-reduce; ``auto``: the one that the backend chooses.
Algorithm = Literal["auto", "ring", "tree"]


@dataclass(frozen=True)
class BackendCost(MeasuredCost):
    """The cost of the backend's own all-reduce, which among other numbers of ranks takes the algorithm that it chooses.

    By size and number of nodes NCCL chooses between rings and double binary trees (NVIDIA/nccl#754), unless
    ``NCCL_ALGO`` is set. Torch's Gloo always takes a ring (gloo/allreduce.cc). But no method is to gain by a poor
    all-reduce of DDP, which a flat ring is on thousands of hosts: who trains there takes NCCL, or could. So among more
    than ``ring_up_to`` ranks ``auto`` is the faster of both with Gloo, too.
    """

    ring_up_to: int = 0
    algorithm: Algorithm = "auto"

    def all_reduce(self, num_bytes: float, world_size: int) -> float:
        """Returns the seconds of an all-reduce: as measured, or of the algorithm that :meth:`chosen` names."""
        if self.chosen(num_bytes, world_size) == "tree":
            return self.double_tree(num_bytes, world_size)
        return super().all_reduce(num_bytes, world_size)

    def chosen(self, num_bytes: float, world_size: int) -> Literal["measured", "ring", "tree"]:
        """Returns the algorithm; ``"measured"``: that which the backend has chosen, of which the time is known."""
        if world_size == self.world_size:
            return "measured"
        if self.algorithm != "auto":
            return self.algorithm
        tree_is_faster = self.double_tree(num_bytes, world_size) < super().all_reduce(num_bytes, world_size)
        return "tree" if world_size > self.ring_up_to and tree_is_faster else "ring"


L = TypeVar("L", bound=LinkCost)


class Change(Protocol):
    """Returns another cost in place of one, of the same kind, given its codec, too."""

    def __call__(self, link: L, codec: str, /) -> L: ...


@dataclass(frozen=True)
class Cluster:
    """The costs of communication among hosts that are alike, each with one rank, or with a replica in shards.

    Costs are of a rank that exchanges with the same one of each other host, all ranks of the hosts at the same time.
    """

    world_size: int  # the number of hosts
    bandwidth: float  # bytes per second that a rank can send while it receives as many, by plain TCP
    backend: BackendCost  # of the backend's own all-reduce, which DDP uses
    halves: LinkCost  # of this package's reduce-scatters and all-gathers, several in a row
    #: Of this package's all-reduce of fp32, by codec, with encoding and decoding; beta is by bytes before encoding.
    all_reduces: Mapping[str, LinkCost]
    #: Of what methods have asked to be measured, by its name and codec, with beta as above.
    exchanges: Mapping[str, Mapping[str, LinkCost]] = field(default_factory=dict)
    torus: LinkCost | None = None  # of the two halves on a torus; None: the ranks are too few, or it is not known
    tree: LinkCost | None = None  # of the two halves on a double binary tree; None: as for the torus
    #: Whether this package's halves can be on a tree: not over NCCL.
    has_trees: bool = True
    ranks_per_replica: int = 1  # neighboring ranks of a host among which FSDP2 shards a replica
    #: Whether FSDP2's all-reduce between replicas runs under the backward pass: not on a CPU.
    hsdp_overlaps: bool = False
    latency: float | None = None  # seconds of one way of a message, if it is another one than was measured

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Cluster:
        """Returns what ``dataclasses.asdict`` was made of."""

        def by_codec(links: Mapping[str, Any]) -> dict[str, LinkCost]:
            return {codec: MeasuredCost(**link) for codec, link in links.items()}

        return cls(
            saved["world_size"],
            saved["bandwidth"],
            BackendCost(**saved["backend"]),
            MeasuredCost(**saved["halves"]),
            by_codec(saved["all_reduces"]),
            {name: by_codec(links) for name, links in saved["exchanges"].items()},
            None if saved["torus"] is None else MeasuredCost(**saved["torus"]),
            None if saved.get("tree") is None else MeasuredCost(**saved["tree"]),
            saved.get("has_trees", True),
            saved["ranks_per_replica"],
            saved["hsdp_overlaps"],
        )

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

        return replace(self._with_links(changed), world_size=number, torus=None, tree=None)

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
        return replace(self._with_links(changed), bandwidth=bandwidth, tree=None)

    def with_latency(self, latency: float, measured: float) -> Cluster:
        """Returns the same hosts with links of another latency; both are the seconds of one way.

        What alpha is more than the measured latency, a message takes as before: the processors' time. Costs are on the
        line of alpha and beta then, as what differed from it differed at the measured latency.
        """

        def changed(link: L, _: str) -> L:
            moved = replace(link, alpha=max(0.0, link.alpha - measured) + latency)
            return replace(moved, ratios=()) if isinstance(moved, MeasuredCost) else moved

        # On a tree other numbers of messages follow each other than in the ring of which alpha and beta are.
        return replace(self._with_links(changed), latency=latency, torus=None, tree=None)

    def with_algorithm(self, algorithm: Algorithm) -> Cluster:
        """Returns the same hosts, among which the backend's all-reduce has another algorithm, unless it is measured."""
        return replace(self, backend=replace(self.backend, algorithm=algorithm))

    def with_errors(self, sign: int) -> Cluster:
        """Returns the cluster with all alphas and betas larger, or smaller, by their standard errors."""

        def changed(link: L, _: str) -> L:
            alpha, beta = link.alpha + sign * _finite(link.alpha_error), link.beta + sign * _finite(link.beta_error)
            return replace(link, alpha=max(0.0, alpha), beta=max(0.0, beta))

        return self._with_links(changed)

    def _compression(self, codec: str) -> float:
        return compression_of(codec, self.world_size)

    def _with_links(self, change: Change) -> Cluster:
        """Returns the cluster with other costs; ``change`` is called with each one and its codec."""

        def by_codec(links: Mapping[str, LinkCost]) -> dict[str, LinkCost]:
            return {codec: change(link, codec) for codec, link in links.items()}

        return replace(
            self,
            backend=change(self.backend, "none"),
            halves=change(self.halves, "none"),
            all_reduces=by_codec(self.all_reduces),
            exchanges={name: by_codec(links) for name, links in self.exchanges.items()},
            torus=None if self.torus is None else change(self.torus, "none"),
            tree=None if self.tree is None else change(self.tree, "none"),
        )


@cache
def compression_of(codec: str | Codec, world_size: int) -> float:
    """Returns the ratio of the bytes of an all-reduce of fp32 values to those with a codec, of many values.

    Of P ranks each sends 2 (P - 1) / P of the values, or, if the codec's wires are gathered, P - 1 times all of them.
    """
    numel, codec = 2**20, get_codec(codec)
    ratio = 4 * numel / codec.wire_bytes(numel, torch.float32)
    return ratio * 2 / world_size if codec.gathered else ratio


def _most_of_another_network(link: LinkCost, on_wire: float) -> float | None:
    """Returns the largest beta that was measured, if it is much less than the seconds of a byte by plain TCP."""
    beta = link.beta + _finite(link.beta_error)
    return beta if 0 < beta < on_wire / OTHER_NETWORK else None


def _finite(error: float) -> float:
    return error if error == error else 0.0  # nan: it was not fitted
