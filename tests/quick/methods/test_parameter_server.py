"""Parameter servers: whatever the timing was, the log of a run explains its weights bit for bit."""

from __future__ import annotations

import os
import signal
import warnings
from functools import cache, partial
from typing import Any

import pytest
import torch

from tests.references.parameter_server import replay
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import DIED, launch
from tests.support.models import OPTIMIZERS, loss, seeded_mlp, state
from tests.support.server_runs import STEPS, Case, ServedRun, assert_explains, assert_weights, train

DEDICATED: dict[str, Any] = {"servers": 1, "dedicated_servers": True}
#: By number of ranks.
CASES: dict[int, dict[str, Case]] = {
    2: {
        "async": Case({"policy": "async", "staleness_lr": "gradient"}, "adamw"),
        "downpour": Case({"policy": "downpour", "n_push": 2, "n_fetch": 3, "servers": 1}, "adamw"),
        "easgd": Case({"policy": "easgd", "period": 1}),
        "diloco": Case({"policy": "diloco", "period": 3, "k": 1, "overlap_steps": 2}, "adamw"),
    },
    3: {
        "sync": Case({"policy": "sync"}),
        "k_sync": Case({"policy": "k_sync", "k": 2}),
        "k_batch_sync": Case({"policy": "k_batch_sync", "k": 2}),
        "k_async": Case({"policy": "k_async", "k": 2, "servers": 2}),
        "k_batch_async": Case({"policy": "k_batch_async"}),
        "n_softsync": Case({"policy": "n_softsync", "n": 2, "staleness_lr": "mean"}),
        "ssp": Case({"policy": "ssp", "staleness_bound": 0}),
        "dc_asgd": Case({"policy": "async", "delay_compensation": "dc_asgd", "dc_lambda": 2.0}),
        "distance": Case({"policy": "async", "staleness_lr": "distance", "distance_bound": 1e-3, "servers": 1}),
        "predicted": Case({"policy": "async", "delay_compensation": "momentum"}),
        "downpour": Case({"policy": "downpour"}),
        "easgd": Case({"policy": "easgd", "period": 3, "servers": 1}, "adamw"),
        "diloco": Case({"policy": "diloco", "period": 3, "k": 2, "servers": 1}, "adamw"),
        "dedicated": Case({"policy": "k_async", "k": 2, **DEDICATED}),
        "own orders": Case({"policy": "async", "independent_shards": True}),
    },
}


@cache
def trained(world_size: int) -> Outcomes:
    return launch_cases({name: partial(train, case) for name, case in CASES[world_size].items()}, world_size)


@pytest.mark.parametrize(("world_size", "name"), [(number, name) for number, cases in CASES.items() for name in cases])
def test_the_log_explains_the_weights(world_size: int, name: str) -> None:
    assert_explains(CASES[world_size][name], trained(world_size)[name])


def lose_learner() -> dict[str, Any]:
    """Trains with a rank 2 that is lost before its sixth step."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run = ServedRun(policy="k_async", k=3, servers=1, on_lost_rank="continue", timeout_s=15, keep_log=True)
        for i in range(STEPS):
            if run.rank == 2 and i == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            run.step(i)
        run.sync.flush()
    saved = run.sync.optimizer_state_dict()["state"]
    return {"weights": run.end(), "log": run.sync.log, "said": [str(one.message) for one in said], "saved": saved}


def test_the_others_continue_without_a_rank_that_dies() -> None:
    """K is bounded by who lives, the log still explains the weights, and all can save them."""
    *others, lost = launch(lose_learner, 3, may_die=(2,))
    assert lost == DIED
    log, saved = others[0]["log"], others[0]["saved"]
    assert_weights([one["weights"] for one in others], state(replay(seeded_mlp(), OPTIMIZERS["sgd"], loss, log)[-1]))
    used = [gradient.rank for update in log for gradient in update.gradients]
    assert [used.count(rank) for rank in range(2)] == [STEPS, STEPS]
    assert used.count(2) <= 5
    (said,) = (text for text in others[0]["said"] if "Lost" in text)
    assert said.startswith("Lost rank 2 after ")
    assert "training continues on rank 0, 1." in said
    for index, momentum in others[1]["saved"].items():
        assert torch.equal(momentum["momentum_buffer"], saved[index]["momentum_buffer"])
