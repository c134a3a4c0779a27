"""Weights that are fetched as encoded differences: the log explains the run, and a flush makes all ranks equal."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.methods.servers import ParameterServer
from lightning_pipesync.methods.servers.learner_copies import LearnerCopies
from lightning_pipesync.methods.servers.messages import Decision, Update
from tests.references.parameter_server import replay, replay_diloco
from tests.support.case_table import Outcomes, launch_cases
from tests.support.models import OPTIMIZERS, loss, seeded_mlp, state
from tests.support.server_runs import ServedRun, assert_weights

STEPS = 8


def train(settings: dict[str, Any], flushed_at: int | None = None) -> tuple[list[Update], dict[str, Tensor]]:
    run = ServedRun(keep_log=True, **settings)
    for i in range(STEPS):
        if i == flushed_at:
            run.sync.flush()
            run.sync.resume()
        run.step(i, [0.0, 0.01, 0.03])
    return run.sync.log, run.end()


CASES: dict[str, dict[str, Any]] = {
    "async": {"policy": "async"},
    "k_batch_async": {"k": 2},
    "bf16": {"policy": "async", "fetch_compression": "bf16"},
    "predicted": {"policy": "k_batch_async", "k": 2, "delay_compensation": "momentum"},
    "dc_asgd": {"policy": "async", "delay_compensation": "dc_asgd", "dc_lambda": 2.0},
    "distance": {"policy": "async", "staleness_lr": "distance", "distance_bound": 1e-3},
}


def settings_of(case: str) -> dict[str, Any]:
    return {"servers": 1, "fetch_compression": "int8", **CASES[case]}


FLUSHED: dict[str, dict[str, Any]] = {
    f"servers={servers}": {"policy": "async", "servers": servers, "fetch_compression": "int4"} for servers in (1, None)
}


DILOCO: dict[str, Any] = {
    **{"policy": "diloco", "period": 2, "k": 1, "servers": 1},
    **{"compression": "int8", "fetch_compression": "int8"},
}


@cache
def trained() -> Outcomes:
    flushed = {case: partial(train, settings, flushed_at=4) for case, settings in FLUSHED.items()}
    cases = {case: partial(train, settings_of(case)) for case in CASES}
    return launch_cases({**cases, **flushed, "diloco": partial(train, DILOCO)}, 3)


@pytest.mark.parametrize("case", CASES)
def test_the_log_explains_the_weights(case: str) -> None:
    settings, outcomes = settings_of(case), trained()[case]
    log = outcomes[0][0]
    given = {name: settings.get(name, 0.0) for name in ("dc_lambda", "distance_bound")}
    codec = get_codec(settings["fetch_compression"])
    expected = state(replay(seeded_mlp(), OPTIMIZERS["sgd"], loss, log, **given, fetch_codec=codec)[-1])
    as_they_are = state(replay(seeded_mlp(), OPTIMIZERS["sgd"], loss, log, **given)[-1])
    assert_weights([weights for _, weights in outcomes], expected)
    assert any(not torch.equal(value, expected[name]) for name, value in as_they_are.items()), "it is lossy"


def test_the_log_explains_diloco_with_a_codec_of_both_directions() -> None:
    outcomes = trained()["diloco"]
    log = outcomes[0][0]
    exact, expected = (
        state(replay_diloco(seeded_mlp(), OPTIMIZERS["sgd"], loss, log, codec=codec)[-1])
        for codec in (None, get_codec("int8"))
    )
    assert_weights([weights for _, weights in outcomes], expected)
    assert any(not torch.equal(value, expected[name]) for name, value in exact.items()), "it is lossy"


@pytest.mark.parametrize("case", FLUSHED)
def test_a_flush_makes_all_ranks_equal(case: str) -> None:
    (_, first), *others = trained()[case]
    assert_weights([weights for _, weights in others], first)


def sent_by(codec: str) -> float:
    model = nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = ParameterServer(model, optimizer, policy="async", servers=1, fetch_compression=codec, timeout_s=60)
    before = sync.metrics()["mib_sent"]
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 256)).sum().backward()
        sync.step()
    dist.barrier()  # both have had their weights
    sent = sync.metrics()["mib_sent"] - before
    sync.flush()
    sync.detach()
    return sent


def test_differences_are_smaller() -> None:
    """Rank 0 sends the weights of 0.25 MiB to rank 1 in each step, int8 in a quarter and some scales."""
    outcomes = launch_cases({codec: partial(sent_by, codec) for codec in ("none", "int8")}, 2)
    whole, encoded = (outcomes[codec][0] for codec in ("none", "int8"))
    assert whole == pytest.approx(4 * 0.25, rel=0.02)
    assert encoded == pytest.approx(whole / 4, rel=0.1)


def test_differences_converge_to_weights_that_do_not_change() -> None:
    values = [torch.linspace(-1, 1, 999) ** 3]
    copies = LearnerCopies([torch.zeros(999)], get_codec("int8"), keeps_fetched=False)
    errors = []
    for version in range(4):
        copies.message_for(1, version, Decision(), lambda: values)
        errors.append(float((copies.of(1)[0] - values[0]).abs().max()))
    assert errors[0] > 1e-4
    assert errors[-1] < 1e-6
    assert float(copies.of(0)[0].abs().max()) == 0, "another learner has other weights"


@pytest.mark.parametrize("policy", ["downpour", "easgd"])
def test_refused_where_learners_move_away(policy: Any) -> None:
    with pytest.raises(ValueError, match=r"fetch_compression='int8' is for weights that learners keep"):
        ParameterServer.config_type(policy=policy, fetch_compression="int8")
