"""What was measured of the hosts and of the network between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.core.cost import LinkCost
from lightning_pipesync.lab.plan.measured_cost import BackendCost, MeasuredCost


@dataclass(frozen=True)
class Cluster:
    """The costs of communication among ranks that are alike, one on each host.

    Attributes:
        world_size: number of ranks.
        bandwidth: bytes per second that a rank can send while it receives as many, by plain TCP.
        backend: of the backend's own all-reduce, which DDP uses.
        halves: of this package's reduce-scatters and all-gathers, several in a row.
        all_reduces: of this package's all-reduce of fp32, by codec, with encoding and decoding; beta is by bytes before
            encoding.
        averages: of local SGD's averages of weights with an outer step, the same.
        servers: of a push and pull through parameter servers on all ranks; alpha is of a push, or of a pull.
        torus: of the two halves on a torus, among these ranks; None: they are too few, or it is not known.
    """

    world_size: int
    bandwidth: float
    backend: LinkCost
    halves: LinkCost
    all_reduces: Mapping[str, LinkCost]
    averages: Mapping[str, LinkCost]
    servers: LinkCost
    torus: LinkCost | None = None

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Cluster:
        """Returns what ``dataclasses.asdict`` was made of."""
        all_reduces, averages = (
            {codec: MeasuredCost(**link) for codec, link in saved[name].items()} for name in ("all_reduces", "averages")
        )
        backend = BackendCost(**saved["backend"])
        halves, servers = (MeasuredCost(**saved[name]) for name in ("halves", "servers"))
        torus = None if saved["torus"] is None else MeasuredCost(**saved["torus"])
        return cls(saved["world_size"], saved["bandwidth"], backend, halves, all_reduces, averages, servers, torus)

    def seconds_on_wire(self, num_bytes: float, codec: str) -> float:
        """Returns the least seconds of an all-reduce: what its encoded bytes take at the bandwidth."""
        return 2 * (self.world_size - 1) / self.world_size * num_bytes / compression_of(codec) / self.bandwidth

    def with_hosts(self, number: int) -> Cluster:
        """Returns more or fewer such hosts."""
        return replace(self, world_size=number, torus=self.torus if number == self.world_size else None)

    def with_bandwidth(self, bandwidth: float) -> Cluster:
        """Returns the same hosts with other links, in bytes per second; what the processors do takes as long."""

        def changed(link: LinkCost, codec: str) -> LinkCost:
            compression = compression_of(codec)
            before, after = 1 / (compression * self.bandwidth), 1 / (compression * bandwidth)
            processing = max(0.0, link.beta - before)
            return replace(link, beta=processing + min(link.beta, before) / before * after)

        return replace(self._with_links(changed), bandwidth=bandwidth)

    def with_errors(self, sign: int) -> Cluster:
        """Returns the cluster with all alphas and betas larger, or smaller, by their standard errors."""
        return self._with_links(
            lambda link, _: replace(
                link,
                alpha=max(0.0, link.alpha + sign * _finite(link.alpha_error)),
                beta=max(0.0, link.beta + sign * _finite(link.beta_error)),
            )
        )

    def _with_links(self, change: Callable[[LinkCost, str], LinkCost]) -> Cluster:
        """Returns the cluster with other costs; ``change`` is called with each one and its codec."""
        return replace(
            self,
            backend=change(self.backend, "none"),
            halves=change(self.halves, "none"),
            all_reduces={codec: change(link, codec) for codec, link in self.all_reduces.items()},
            averages={codec: change(link, codec) for codec, link in self.averages.items()},
            servers=change(self.servers, "none"),
            torus=None if self.torus is None else change(self.torus, "none"),
        )


@cache
def compression_of(codec: str) -> float:
    """Returns the ratio of the size of fp32 values to their size on the wire, of many values."""
    numel = 2**20
    return 4 * numel / get_codec(codec).wire_bytes(numel, torch.float32)


def _finite(error: float) -> float:
    return error if error == error else 0.0  # nan: it was not fitted
