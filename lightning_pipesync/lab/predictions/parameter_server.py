"""What the laboratory knows of parameter servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_pipesync.lab.predictions.cluster import Cluster
from lightning_pipesync.lab.predictions.entry import BenchCandidate, Exchange, LabEntry, Prediction
from lightning_pipesync.lab.predictions.work import Work
from lightning_pipesync.methods.servers.config import ParameterServerConfig

#: The exchange whose cost a plan measures.
PUSH_AND_PULL = "push and pull"

#: The partition with which learners take their batches from a queue.
QUEUE = {"partition": "work_queue"}


@dataclass(frozen=True)
class ServedConfig(ParameterServerConfig):
    """Settings of a training with parameter servers."""

    lr_scale: float | None = None
    """Factor on the task's learning rate. None: the number of gradients of an update over that of the ranks, so that a
    sample counts as much as with an update by the mean of all ranks' gradients; 1 with ``diloco``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr_scale is not None and not self.lr_scale > 0:
            raise ValueError(f"lr_scale must be a positive number, got {self.lr_scale!r}.")


class ServedCandidate(BenchCandidate):
    """Learners whose passes may be cancelled, and whose staleness is logged."""

    def check_of_pass(self, sync: Any) -> Callable[[], object]:
        cancel: Callable[[], object] = sync.cancel_if_late
        return cancel

    def staleness(self, sync: Any) -> list[int] | None:
        if not self.own_pace or sync.transport.rank != 0:
            return None
        found = [staleness for update in sync.log for staleness in update.staleness]
        return [found.count(number) for number in range(max(found, default=-1) + 1)]


class ParameterServerLab(LabEntry):
    """Pushes and pulls through servers on all ranks, by learners at their own pace."""

    compared_trainings = ("policy=ssp,staleness_bound=100,servers=1",)
    training_config_type = ServedConfig
    exchanges = (Exchange(PUSH_AND_PULL, {"none": {}}, at_once=True),)

    def bench_candidates(
        self, label: str, settings: Mapping[str, Any], bucket_mb: Sequence[float]
    ) -> list[BenchCandidate]:
        return [BenchCandidate(label, ParameterServerConfig(**settings), limit="serial")]

    def training(self, config: Any, world_size: int, divided_data: bool) -> BenchCandidate:
        """Returns learners at their own pace, unless all wait for each other, or each rank has separate data."""
        policy = config.policy_for(world_size)
        lr_scale = config.lr_scale or (1.0 if policy.by_steps else policy.gradients / world_size)
        if config.policy == "sync" or divided_data:
            return ServedCandidate(self.label, config, lr_scale=lr_scale)
        logged = replace(config, **QUEUE, keep_log=True)
        return ServedCandidate(self.label, logged, own_pace=True, lr_scale=lr_scale)

    def predict(self, work: Work, cluster: Cluster) -> Iterator[list[Prediction]]:
        if costs := cluster.exchanges.get(PUSH_AND_PULL):
            seconds = work.seconds * work.pace + costs["none"].sharded_servers(work.num_bytes, cluster.world_size)
            yield [Prediction(self.name, QUEUE, seconds, exact=False, why="stale; nobody waits for a slow rank")]

    def trial(self, settings: Mapping[str, Any]) -> BenchCandidate:
        """Returns a trial without a queue: each rank has a batch, which it takes again and again."""
        return super().trial({name: value for name, value in settings.items() if name not in QUEUE})
