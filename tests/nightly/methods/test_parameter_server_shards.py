"""Servers whose shards have their own order of updates: all logs together explain the weights bit for bit."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Adagrad, Optimizer

from lightning_pipesync.methods.servers import ParameterServerConfig
from lightning_pipesync.methods.servers.messages import Push, Update
from lightning_pipesync.methods.servers.router import MessageRouter
from tests.references.parameter_server import replay_shards
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import DIED, launch
from tests.support.models import OPTIMIZERS, loss, seeded_mlp, state
from tests.support.server_runs import ServedRun, assert_weights

STEPS, MAX_NORM = 8, 0.5
ADAGRAD: dict[str, Callable[[nn.Module], Optimizer]] = {"adagrad": lambda model: Adagrad(model.parameters(), lr=0.05)}

#: By number of ranks and name: optimizer and settings.
CASES: dict[int, dict[str, tuple[str, dict[str, Any]]]] = {
    3: {
        "async": ("sgd", {"policy": "async"}),
        "async, by gradient": ("adamw", {"policy": "async", "staleness_lr": "gradient"}),
        "dc_asgd": ("sgd", {"policy": "async", "delay_compensation": "dc_asgd", "dc_lambda": 2.0, "servers": 2}),
        "clipped": ("adamw", {"policy": "async"}),
        "downpour": ("adamw", {"policy": "downpour"}),
        "downpour, pushes": ("sgd", {"policy": "downpour", "n_push": 3, "n_fetch": 2}),
        "downpour, adagrad": ("adagrad", {"policy": "downpour", "n_push": 2, "n_fetch": 2}),
    },
    4: {
        "dedicated": ("sgd", {"policy": "async", "servers": 2, "dedicated_servers": True}),
        "dedicated, downpour": (
            "adagrad",
            {"policy": "downpour", "n_push": 2, "servers": 2, "dedicated_servers": True},
        ),
    },
}


class Hold:
    """Makes two servers use the first pushes of two learners in different orders, whichever comes first."""

    def __init__(self, rank: int, learners: tuple[int, int]) -> None:
        self._deliver = MessageRouter._deliver
        self._last, self._first = learners if rank == 1 else learners[::-1]
        self._came, self._holds = threading.Event(), rank < 2

    def deliver(self, router: MessageRouter, rank: int, message: Any) -> None:
        is_push = self._holds and isinstance(message, Push)
        if is_push and rank == self._last:
            assert self._came.wait(60)
        self._deliver(router, rank, message)
        if is_push and rank == self._first:
            self._came.set()

    def __enter__(self) -> None:
        MessageRouter._deliver = lambda *given: self.deliver(*given)  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        MessageRouter._deliver = self._deliver  # type: ignore[method-assign]


def train(name: str, optimizer: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Trains, with a flush in between."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    makes: Any = ADAGRAD.get(optimizer, optimizer)
    learners = (world_size - 2, world_size - 1)
    with Hold(rank, learners):
        run = ServedRun(makes, keep_log=True, independent_shards=True, **settings)
        for half in range(2):
            for step in () if run.sync.only_serves else range(half * STEPS // 2, (half + 1) * STEPS // 2):
                run.backward(step)
                if name == "clipped":
                    run.sync.reduce()
                    run.sync.clip(MAX_NORM)
                run.sync.step()
            run.sync.flush()
    metrics, slices = run.sync.metrics(), slices_of(run)
    return {"log": run.sync.log, "weights": run.end(), "metrics": metrics, "slices": slices}


def slices_of(run: ServedRun) -> list[dict[str, slice]]:
    """Returns each server's part of each parameter, by name."""
    return [
        {name: place for bucket in run.sync._buckets for name, place in bucket.slices(server).items()}
        for server in range(run.sync._router.num_servers)
    ]


@cache
def trained(world_size: int) -> Outcomes:
    return launch_cases({name: partial(train, name, *case) for name, case in CASES[world_size].items()}, world_size)


@pytest.mark.parametrize(("world_size", "name"), [(number, name) for number, cases in CASES.items() for name in cases])
def test_the_logs_explain_the_weights(world_size: int, name: str) -> None:
    outcomes = trained(world_size)[name]
    optimizer, settings = CASES[world_size][name]
    num_servers = settings.get("servers", world_size)
    logs: list[list[Update]] = [outcome["log"] for outcome in outcomes[:num_servers]]
    orders = [[(update.gradients[0].rank, update.gradients[0].step) for update in log] for log in logs]
    assert all(sorted(order) == sorted(orders[0]) for order in orders), "all shards have had all gradients"
    first, second = world_size - 2, world_size - 1
    begun = [next(rank for rank, _ in order if rank in (first, second)) for order in orders[:2]]
    assert begun == [first, second], "in other orders"
    given = {"dc_lambda": settings.get("dc_lambda", 0.0), "max_norm": MAX_NORM if name == "clipped" else None}
    expected = replay_shards(
        seeded_mlp(), {**OPTIMIZERS, **ADAGRAD}[optimizer], loss, logs, outcomes[0]["slices"], **given
    )
    assert_weights([outcome["weights"] for outcome in outcomes], state(expected))
    assert all(outcome["metrics"]["updates"] == len(logs[0]) for outcome in outcomes)


def lose_one(policy: str) -> dict[str, Any]:
    """Trains with a last rank that dies in its sixth step."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run = ServedRun(policy=policy, independent_shards=True, servers=2, keep_log=True, timeout_s=15)
        for step in range(STEPS):
            if run.rank == 3 and step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            run.step(step)
        run.sync.flush()
        weights = state(run.model)
    slices = slices_of(run)
    run.sync.detach()
    texts = [text for one in said if "Lost rank 3" in (text := str(one.message))]
    return {"log": run.sync.log, "weights": weights, "said": texts, "slices": slices}


@pytest.mark.parametrize("policy", ["async", "downpour"])
def test_each_server_continues_without_a_lost_rank(policy: str) -> None:
    """A gradient that only one of them has is used by that one; the logs explain this, too."""
    *others, lost = launch(lose_one, 4, policy, may_die=(3,))
    assert lost == DIED
    assert_weights([outcome["weights"] for outcome in others], others[0]["weights"])
    assert [len(outcome["said"]) for outcome in others] == [1, 0, 0]
    logs = [outcome["log"] for outcome in others[:2]]
    for log in logs:
        steps = [[g.step for update in log for g in update.gradients if g.rank == rank] for rank in range(4)]
        assert [len(of_rank) for of_rank in steps[:3]] == [STEPS] * 3
        assert len(steps[3]) <= 5
    expected = replay_shards(seeded_mlp(), OPTIMIZERS["sgd"], loss, logs, others[0]["slices"])
    assert_weights([others[0]["weights"]], state(expected))


def resume(policy: str) -> tuple[dict[str, Tensor], dict[str, Tensor], tuple[int, ...]]:
    """One rank trains and serves, so that timing plays no part; returns the weights without and with a resumption."""
    weights = []
    for resumes in (False, True):
        run = ServedRun("adamw", policy=policy, independent_shards=True, servers=1)
        run.steps(range(3))
        run.sync.flush()
        if resumes:
            saved, optimizer = run.sync.state_dict(), run.sync.optimizer_state_dict()
            run.sync.detach()
            other = ServedRun("adamw", policy=policy, independent_shards=True, servers=1, seed=1)
            other.model.load_state_dict(state(run.model))
            other.optimizer.load_state_dict(optimizer)
            other.sync.load_state_dict(saved)
            run = other
        run.steps(range(3, 6))
        run.sync.flush()
        versions = run.sync.state_dict()["versions"]
        weights.append(run.end())
    return weights[0], weights[1], versions


def test_a_resumed_run_continues_with_each_shards_version() -> None:
    outcomes = launch_cases({policy: partial(resume, policy) for policy in ("async", "downpour")}, 1)
    for policy in ("async", "downpour"):
        [(weights, resumed, versions)] = outcomes[policy]
        assert_weights([resumed], weights)
        assert versions == (6,)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "ssp"}, "independent_shards=True is for policies in which every push is an update"),
        ({"policy": "easgd"}, "independent_shards=True is for policies in which every push is an update"),
        ({"policy": "async", "delay_compensation": "momentum"}, "delay_compensation='momentum' is for weights of one"),
        ({"policy": "async", "staleness_lr": "distance"}, "staleness_lr='distance' is for weights of one version"),
    ],
)
def test_what_needs_one_order_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParameterServerConfig(**settings, independent_shards=True)


def test_one_server_has_one_order() -> None:
    settings = ParameterServerConfig(policy="async", independent_shards=True, servers=1)
    assert set(settings.without_effect()) >= {"independent_shards"}
