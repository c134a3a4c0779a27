"""A method of a user's on the engine of replicas: it gets what its settings declare, or an error says why not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.methods.replicas.method import ReplicaMethod
from lightning_pipesync.methods.replicas.policy import AveragingPolicy
from lightning_pipesync.methods.replicas.settings import ReplicaSettings
from tests.support.case_table import launch_cases
from tests.support.harness import assert_raised, on_ranks, raised
from tests.support.models import Run, assert_same, state

PERIOD = 4


@dataclass(frozen=True)
class EveryConfig(ReplicaSettings):
    """What a user may set, of what the engine offers."""

    period: int = PERIOD
    compression: str = "none"
    fragments: int = 1
    participation: float = 1.0
    ranks_per_replica: int = 1
    delta: float = 0.5
    lighthouse: str | None = None
    timeout_s: float = 1800.0


class Every(AveragingPolicy):
    def __init__(self, period: int, number: int = 1) -> None:
        self._period, self._number = period, number

    def may_start(self, step: int) -> bool:
        return step % self._period == 0

    def end_step(self, step: int) -> int:
        return self._number if self.may_start(step) else 0


class AveragesEvery(ReplicaMethod):
    """Averages the weights after every ``period``-th step."""

    name = "averages_every"
    config_type = EveryConfig

    config: EveryConfig

    def _policy(self, optimizer: Optimizer, parameters: Sequence[NamedParameter]) -> AveragingPolicy:
        return Every(self.config.period)


class Disagrees(AveragesEvery):
    """Its policy starts averages at other steps on rank 1, or another number of them."""

    def _policy(self, optimizer: Optimizer, parameters: Sequence[NamedParameter]) -> AveragingPolicy:
        if dist.get_rank() == 0:
            return Every(self.config.period)
        return Every(self.config.period, 2) if self.config.delta == 2 else Every(self.config.period + 2)


def train_in_groups() -> list[dict[str, Tensor]]:
    """Returns this rank's weights before the average, after it, and one step later."""
    run = Run(AveragesEvery, "sgd", ranks_per_replica=2)
    weights = []
    for step in range(PERIOD + 1):
        run.step(step)
        weights.append(state(run.model))
    assert "mib_between_groups" in run.sync.metrics()
    run.end()
    return weights[-3:]


def test_ranks_of_a_group_train_one_replica() -> None:
    outcomes = on_ranks(train_in_groups, 4)
    for rank, (before, after, later) in enumerate(outcomes):
        in_group, other = outcomes[rank ^ 1], outcomes[(rank + 2) % 4]
        assert_same(before, in_group[0])
        assert_same(later, in_group[2])
        assert_same(after, outcomes[0][1])
        for i, own in ((0, before), (2, later)):
            assert not torch.equal(own["0.weight"], other[i]["0.weight"])


def attach(method: type[ReplicaMethod], **settings: Any) -> tuple[str, str] | None:
    outcome = raised(lambda: Run(method, "sgd", **settings).sync.detach())
    dist.barrier()
    return outcome


def disagree(flushes_early: bool, **settings: Any) -> tuple[str, str] | None:
    run = Run(Disagrees, "sgd", timeout_s=20, **settings)
    outcome = raised(lambda: (run.steps(range(PERIOD + 1 if flushes_early else 20)), run.sync.flush()))
    run.sync.detach()
    dist.barrier()
    return outcome


#: By name what a rank raises, on each of two ranks, and words of the error.
REFUSED: dict[str, tuple[Any, list[str]]] = {
    "three ranks of two": (partial(attach, AveragesEvery, ranks_per_replica=3), ["ValueError", "ranks_per_replica=3"]),
    "no rank to average": (partial(attach, AveragesEvery, participation=0.2), ["ValueError", "participation=0.2"]),
    "replicas that come and go": (
        partial(attach, AveragesEvery, lighthouse="localhost:1"),
        ["ValueError", "lighthouse='localhost:1'", "AveragesEvery", "ElasticReplicaMethod"],
    ),
    "other steps": (partial(disagree, False), ["RuntimeError", "end_step of their policy", "must return the same"]),
    "another number": (partial(disagree, False, delta=2, period=8), ["RuntimeError", "end_step of their policy"]),
    "no average": (partial(disagree, True), ["RuntimeError", "Rank 1 is about to consolidate", "end_step"]),
}


def test_what_the_engine_cannot_do_is_refused_by_name() -> None:
    outcomes = launch_cases({name: case for name, (case, _) in REFUSED.items()}, 2)
    for name, (_, (kind, *words)) in REFUSED.items():
        for outcome in outcomes[name]:
            assert_raised(outcome, kind, *words)
