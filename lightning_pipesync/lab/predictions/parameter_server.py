"""What the laboratory knows of parameter servers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning_pipesync.lab.predictions.cluster import Cluster
from lightning_pipesync.lab.predictions.entry import BenchCandidate, Exchange, LabEntry, Prediction
from lightning_pipesync.lab.predictions.work import Work
from lightning_pipesync.methods.servers.config import ParameterServerConfig

#: The exchange whose cost a plan measures.
PUSH_AND_PULL = "push and pull"

#: The partition with which learners take their batches from a queue.
QUEUE = {"partition": "work_queue"}


class ParameterServerLab(LabEntry):
    """Pushes and pulls through servers on all ranks, by learners at their own pace."""

    exchanges = (Exchange(PUSH_AND_PULL, {"none": {}}, at_once=True),)

    def bench_candidates(
        self, label: str, settings: Mapping[str, Any], bucket_mb: Sequence[float]
    ) -> list[BenchCandidate]:
        return [BenchCandidate(label, ParameterServerConfig(**settings), limit="serial")]

    def predict(self, work: Work, cluster: Cluster) -> Iterator[list[Prediction]]:
        if costs := cluster.exchanges.get(PUSH_AND_PULL):
            seconds = work.seconds * work.pace + costs["none"].sharded_servers(work.num_bytes, cluster.world_size)
            yield [Prediction(self.name, QUEUE, seconds, exact=False, why="stale; nobody waits for a slow rank")]

    def trial(self, settings: Mapping[str, Any]) -> BenchCandidate:
        """Returns a trial without a queue: each rank has a batch, which it takes again and again."""
        return super().trial({name: value for name, value in settings.items() if name not in QUEUE})
