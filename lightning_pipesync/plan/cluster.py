"""What was measured of the hosts and of the network between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.core.cost import LinkCost


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
    """

    world_size: int
    bandwidth: float
    backend: LinkCost
    halves: LinkCost
    all_reduces: Mapping[str, LinkCost]

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Cluster:
        """Returns what ``dataclasses.asdict`` was made of."""
        links = {name: LinkCost(**link) for name, link in saved["all_reduces"].items()}
        backend, halves = LinkCost(**saved["backend"]), LinkCost(**saved["halves"])
        return cls(saved["world_size"], saved["bandwidth"], backend, halves, links)

    def with_bandwidth(self, bandwidth: float) -> Cluster:
        """Returns the same hosts with other links, in bytes per second; what the processors do takes as long."""

        def changed(link: LinkCost, compression: float = 1.0) -> LinkCost:
            before, after = 1 / (compression * self.bandwidth), 1 / (compression * bandwidth)
            processing = max(0.0, link.beta - before)
            return replace(link, beta=processing + min(link.beta, before) / before * after)

        return replace(
            self,
            bandwidth=bandwidth,
            backend=changed(self.backend),
            halves=changed(self.halves),
            all_reduces={codec: changed(link, compression_of(codec)) for codec, link in self.all_reduces.items()},
        )

    def with_errors(self, sign: int) -> Cluster:
        """Returns the cluster with all alphas and betas larger, or smaller, by their standard errors."""
        return self._with_links(
            lambda link: replace(
                link,
                alpha=max(0.0, link.alpha + sign * _finite(link.alpha_error)),
                beta=max(0.0, link.beta + sign * _finite(link.beta_error)),
            )
        )

    def _with_links(self, change: Callable[[LinkCost], LinkCost]) -> Cluster:
        all_reduces = {codec: change(link) for codec, link in self.all_reduces.items()}
        return replace(self, backend=change(self.backend), halves=change(self.halves), all_reduces=all_reduces)


def compression_of(codec: str) -> float:
    """Returns the ratio of the size of fp32 values to their size on the wire, of many values."""
    numel = 2**20
    return 4 * numel / get_codec(codec).wire_bytes(numel, torch.float32)


def _finite(error: float) -> float:
    return error if error == error else 0.0  # nan: it was not fitted
