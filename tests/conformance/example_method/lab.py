"""What benchmarks and plans know of gradient averaging."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning_pipesync.lab.predictions.cluster import Cluster
from lightning_pipesync.lab.predictions.entry import BenchCandidate, LabEntry, Prediction, waiting_share
from lightning_pipesync.lab.predictions.registry import register_lab
from lightning_pipesync.lab.predictions.work import Work
from tests.conformance.example_method.config import AveragingConfig
from tests.conformance.example_method.runtime import Averaging


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


register_lab(Averaging, AveragingLab)
