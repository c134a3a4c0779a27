"""Local SGD takes in a process that comes in a lost rank's place: bit for bit the simulation of those who take part."""

from __future__ import annotations

import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipesync import LocalSGD
from lightning_pipesync.core.faults.heartbeat import Heartbeat
from tests.harness import DIED, launch
from tests.lost_ranks import TIMEOUT_S, die, stopped, wait_for, watch_processes, write
from tests.models import OPTIMIZERS, assert_same, loss, seeded_mlp, state
from tests.reference_lost_rank import simulate
from tests.test_local_sgd_lost_rank import nesterov

#: Steps between two flushes, of a round, and of the training.
LAP, PERIOD, NUM_STEPS = 4, 3, 12
#: The step before which rank 1 dies, and the flush after which another process has its place.
DIES, BACK = 5, 8


def come_back(folder: Path, fate: str) -> None:
    """Takes rank 1's place once that has died, and says so when rank 0 can find this process; or dies then."""
    os.environ["RANK"] = "1"
    wait_for(lambda: stopped(folder / "dying"))
    call, calls = Heartbeat.call, []

    def applied(self: Heartbeat, *args: Any) -> Any:
        result = call(self, *args)
        calls.append(1)
        if fate == "dies" and len(calls) == 2:
            write(folder / "applied", os.getpid())
            die()
        elif fate != "dies" and len(calls) == 1:
            write(folder / "applied", os.getpid())
        return result

    Heartbeat.call = applied  # type: ignore[method-assign]


def train(settings: dict[str, Any], folder: Path, fate: str = "") -> dict[str, Any]:
    """Trains with a rank 1 that dies; the process with the highest number takes its place."""
    process, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
    os.environ["WORLD_SIZE"] = str(world_size)
    # What is waited out: the next beat of a process that has died, and the answer of a store that has ended.
    watch_processes(**{"dies": {"LISTENED": 3}, "ends": {"STORE_S": 5}}.get(fate, {}))
    settings = {"period": PERIOD, "on_lost_rank": "continue", "timeout_s": TIMEOUT_S, **settings}
    if process == world_size:
        come_back(folder, fate)
        settings["period"] = PERIOD + (fate == "differs")
    model = seeded_mlp(process, batch_norm=True)
    optimizer = OPTIMIZERS["sgd"](model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            sync = LocalSGD(model, optimizer, **settings)
        except (RuntimeError, ValueError) as error:
            return {"raised": str(error)}
        began, laps = sync.num_steps, []
        steps_seen = nn.Linear(1, 1, bias=False).requires_grad_(False)  # in place of a running average
        steps_seen.weight.fill_(0)
        sync.follow(steps_seen)
        seen = float(steps_seen.weight)
        while sync.num_steps < NUM_STEPS:
            laps.append([int(x) for x in sync.prepare_train_loader(DataLoader(range(12)))])
            for _ in range(LAP):
                step = sync.num_steps
                if process == 1 and step == DIES:
                    write(folder / "dying", os.getpid())
                    die()
                optimizer.zero_grad()
                loss(model, step, int(os.environ["RANK"])).backward()
                sync.step()
                steps_seen.weight.fill_(sync.num_steps)
            if process == 0 and sync.num_steps == BACK:
                wait_for(partial(stopped, folder / "applied") if fate == "dies" else (folder / "applied").exists)
                if fate == "ends":
                    break
            sync.flush()
    outcome = {
        "weights": state(model),
        "began": began,
        "seen": seen,
        "laps": laps,
        "said": [str(one.message) for one in said if " rounds: " in str(one.message)],
        "rank": dist.get_rank(),
        "ranks": sync.metrics()["ranks"],
    }
    sync.detach()
    return outcome


@pytest.mark.parametrize("outer", ["none", "nesterov"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_comes_back(outer: str, world_size: int, tmp_path: Path) -> None:
    """It starts from the consolidated weights, rank 0's optimizer and the whole of the outer optimizer's state."""
    settings = {"outer_optimizer": outer}
    outcomes = launch(train, world_size + 1, settings, tmp_path, timeout_s=120, init=False, may_die=(1,))
    assert outcomes.pop(1) == DIED
    replicas = simulate(
        seeded_mlp(batch_norm=True),
        OPTIMIZERS["sgd"],
        loss,
        world_size=world_size,
        num_steps=NUM_STEPS,
        period=PERIOD,
        lost={1: DIES + 1},
        make_outer=None if outer == "none" else nesterov,
        flushes=range(LAP, NUM_STEPS + 1, LAP),
        back={1: BACK},
    )
    came_back = outcomes[-1]
    assert came_back["began"] == came_back["seen"] == BACK
    assert came_back["rank"] == 1
    for outcome in outcomes:
        assert outcome["ranks"] == world_size
        expected = state(replicas[outcome["rank"]])
        assert_same(outcome["weights"], expected)
    assert sorted(x for outcome in outcomes for x in outcome["laps"][-1]) == list(range(12)), "divided anew"
    lost, back = outcomes[0]["said"]
    assert lost.startswith("Lost rank 1 (host ")
    assert back.startswith("Took in rank 1 (host ")


def test_one_who_dies_before_it_is_taken_in_is_not_waited_for(tmp_path: Path) -> None:
    outcomes = launch(train, 3, {}, tmp_path, "dies", timeout_s=120, init=False, may_die=(1, 2))
    assert outcomes[1:] == [DIED, DIED]
    assert outcomes[0]["ranks"] == 1
    assert len(outcomes[0]["said"]) == 1


def test_one_with_other_settings_is_refused_and_the_others_go_on(tmp_path: Path) -> None:
    outcomes = launch(train, 4, {}, tmp_path, "differs", timeout_s=120, init=False, may_die=(1,))
    assert "The ranks differ in period: rank 0 has 3, rank 1 has 4." in outcomes[3]["raised"]
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome["ranks"] == 2
        assert sum(map(len, outcome["laps"])) >= 2 * 4 + 6, "the others' share after that"
    assert_same(outcomes[2]["weights"], outcomes[0]["weights"])


def test_one_whose_job_ends_says_so(tmp_path: Path) -> None:
    outcomes = launch(train, 3, {}, tmp_path, "ends", timeout_s=120, init=False, may_die=(1,))
    assert "Rank 1 cannot rejoin its job: " in outcomes[2]["raised"]
    assert "Restart all ranks" in outcomes[2]["raised"]
