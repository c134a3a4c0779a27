"""Dedicated servers: the other ranks train, by the same policies, and the log explains the weights."""

from __future__ import annotations

import os
import signal
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipesync import ParameterServer
from lightning_pipesync.methods.servers.messages import Update
from tests.references.parameter_server import replay, replay_diloco, replay_downpour, replay_easgd
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import DIED, assert_refused, launch, on_ranks, raised
from tests.support.models import OPTIMIZERS, loss, seeded_mlp
from tests.support.server_runs import ServedRun, assert_weights

STEPS = 8

#: By name: settings, and what replays them.
POLICIES: dict[str, tuple[dict[str, Any], Any]] = {
    "sync": ({"policy": "sync"}, replay),
    "k_batch_sync": ({"policy": "k_batch_sync", "k": 2}, replay),
    "k_async": ({"policy": "k_async", "k": 2}, replay),
    "k_batch_async": ({}, replay),
    "predicted": ({"policy": "async", "delay_compensation": "momentum"}, replay),
    "ssp": ({"policy": "ssp", "staleness_bound": 0}, replay),
    "downpour": ({"policy": "downpour", "n_push": 2}, replay_downpour),
    "easgd": ({"policy": "easgd", "period": 2}, replay_easgd),
    "diloco": ({"policy": "diloco", "period": 2, "k": 1}, replay_diloco),
}
#: By number of ranks and servers, the policies that are trained.
TRAINED = {
    (3, 1): tuple(POLICIES),
    (4, 2): ("k_batch_sync", "k_async", "predicted", "downpour", "easgd", "diloco"),
}
SERVES = {"servers": 1, "dedicated_servers": True}


def train(settings: dict[str, Any]) -> tuple[list[Update], dict[str, Tensor], dict[str, Tensor], bool]:
    """Trains with delays at random. Returns the log, the weights, the buffers before the end, and who only serves."""
    run = ServedRun(batch_norm=True, dedicated_servers=True, keep_log=True, **settings)
    sync = run.sync
    own: dict[str, Tensor] = {}
    for half in range(2):
        run.train(range(half * STEPS // 2, (half + 1) * STEPS // 2), [0.0, 0.01, 0.03])
        own = {name: buffer.clone() for name, buffer in run.model.named_buffers()}
        sync.flush()
        saved = sync.optimizer_state_dict(run.optimizer)
        on_learners = settings.get("policy") in ("easgd", "diloco")
        assert saved["state"] or (sync.only_serves and on_learners), "its optimizers run on learners"
        sync.resume()
    return sync.log, run.end(), own, sync.only_serves


@cache
def trained(world_size: int, servers: int) -> Outcomes:
    policies = TRAINED[world_size, servers]
    return launch_cases({one: partial(train, {**POLICIES[one][0], "servers": servers}) for one in policies}, world_size)


@pytest.mark.parametrize(
    ("world_size", "servers", "policy"), [(*key, policy) for key, policies in TRAINED.items() for policy in policies]
)
def test_the_log_explains_the_weights(world_size: int, servers: int, policy: str) -> None:
    _, reference = POLICIES[policy]
    outcomes = trained(world_size, servers)[policy]
    assert [serves for *_, serves in outcomes] == [rank < servers for rank in range(world_size)]
    log = outcomes[0][0]
    given = {"force": 0.9 / (world_size - servers)} if policy == "easgd" else {}
    last = reference(seeded_mlp(batch_norm=True), OPTIMIZERS["sgd"], loss, log, **given)[-1]
    buffers = outcomes[servers][2]  # of the first learner
    assert_weights([weights for _, weights, _, _ in outcomes], {**dict(last.named_parameters()), **buffers})
    assert {gradient.rank for update in log for gradient in update.gradients} == set(range(servers, world_size))
    if policy in ("sync", "k_batch_async"):
        assert max(len(update.gradients) for update in log) == world_size - servers, "as many as there are learners"


def train_from_a_work_queue(timeout_s: float, pause_s: float) -> list[int]:
    run = ServedRun(**SERVES, partition="work_queue", timeout_s=timeout_s)
    seen: list[int] = []
    for (indices,) in run.sync.prepare_train_loader(DataLoader(TensorDataset(torch.arange(24)), batch_size=4)):
        seen += indices.tolist()
        run.step(len(seen), [pause_s])
    run.end()
    return seen


def test_only_learners_take_batches_from_the_queue() -> None:
    """The server waits for longer than the timeout, as the learners are alive."""
    serving, *learning = on_ranks(train_from_a_work_queue, 3, 10.0, 4.0)
    assert serving == []
    assert sorted(index for seen in learning for index in seen) == list(range(24))
    assert all(learning)


def lose_learner() -> tuple[str, str] | None:
    run = ServedRun(**SERVES, on_lost_rank="raise")

    def steps() -> None:
        try:
            for i in [] if run.sync.only_serves else range(50):
                if i == 4 and run.rank == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                run.step(i)
            run.sync.flush()
        finally:
            run.sync.detach()

    return raised(steps)


def test_a_dedicated_server_names_a_lost_learner() -> None:
    *others, dead = launch(lose_learner, 3, may_die=(2,))
    assert dead == DIED
    for outcome in others:
        assert outcome is not None
        assert "Rank 2 (host " in outcome[1]


def end_without_a_flush() -> tuple[str, str] | None:
    run = ServedRun(**SERVES, on_lost_rank="raise", timeout_s=10)
    if run.sync.only_serves:
        return raised(run.sync.flush)
    run.step(0)
    run.sync.detach(timeout_s=1.0)
    return None


def test_a_dedicated_server_does_not_wait_for_ever_for_a_learner_that_has_ended() -> None:
    outcome = on_ranks(end_without_a_flush, 2)[0]
    assert outcome is not None
    assert "Rank 1 (host " in outcome[1]


def step_and_refuse() -> list[tuple[str, str] | None]:
    run, loader = ServedRun(**SERVES), DataLoader(TensorDataset(torch.arange(8)))
    stepped = raised(lambda: run.step(0)) if run.sync.only_serves else None
    outcomes = [stepped, raised(lambda: run.sync.prepare_train_loader(loader))]
    run.sync.detach()
    for settings in ({"servers": 2}, {"k": 2}):
        dist.barrier()
        outcomes.append(raised(lambda settings=settings: ServedRun(**{**SERVES, **settings})))
    dist.barrier()
    return outcomes


def test_refusals() -> None:
    texts = ["set partition='work_queue'", "leaves none of the 2 ranks to train", "more than the 1 learners"]
    for rank, (stepped, *refused) in enumerate(on_ranks(step_and_refuse, 2)):
        assert rank == 1 or "Rank 0 only serves" in str(stepped)
        assert_refused(dict(zip(texts, refused, strict=True)))


def test_somebody_has_to_train() -> None:
    with pytest.raises(ValueError, match="set servers=1, or more"):
        ParameterServer.config_type(dedicated_servers=True)
