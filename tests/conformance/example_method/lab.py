"""What benchmarks and plans know of gradient averaging."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning_pipesync.core.cluster import Cluster
from lightning_pipesync.core.work import Work
from lightning_pipesync.methods.laboratory import BenchCandidate, LabEntry, Prediction, waiting_share
from tests.conformance.example_method.config import AveragingConfig


class AveragingLab(LabEntry):
    """An all-reduce after the backward pass, which hides under nothing."""

    def bench_candidates(
        self, label: str, settings: Mapping[str, Any], bucket_mb: Sequence[float]
    ) -> list[BenchCandidate]:
        return [BenchCandidate(label, AveragingConfig(**settings), limit="serial")]

    def predict(self, work: Work, cluster: Cluster) -> Iterator[list[Prediction]]:
        compute = work.seconds_with(self.name)
        seconds = compute + cluster.all_reduces["none"].all_reduce(work.num_bytes, cluster.world_size)
        yield [Prediction(self.name, {}, seconds, why=waiting_share(compute, seconds))]
