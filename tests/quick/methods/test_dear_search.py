"""DeAR's search for the best bucket size: what it tries, and that weights stay DDP's while buckets change."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from lightning_pipesync.core.buckets import Fusion
from lightning_pipesync.methods.dear import DeAR
from lightning_pipesync.methods.dear.fusion_search import SEARCHES, Trial
from tests.support.case_table import launch_cases
from tests.support.method_runs import backwards
from tests.support.models import Averaged, Run, assert_same, state

#: Sizes of some values each, so that a small model has several buckets.
SEARCHING: dict[str, Any] = {"bucket_mb": 1e-4, "search_mb": (4e-5, 4e-4), "trial_steps": 4, "max_trials": 5}
STEPS = 40


def await_decision(sync: Any) -> None:
    """Waits until rank 0 has chosen the next size, so that the steps of each trial are known."""
    if isinstance(sync, DeAR) and sync._tuner._decision is not None:
        sync._tuner._decision.wait()


def step(run: Run, number: int) -> None:
    run.step(number)
    await_decision(run.sync)


def train(optimizer_name: str, settings: dict[str, Any]) -> dict[str, Any]:
    run = Run(DeAR, optimizer_name, backwards(), **{**SEARCHING, **settings})
    fusions = []
    for number in range(STEPS):
        fusions.append(run.sync.fusion)
        step(run, number)
    run.sync.flush()
    kept = run.sync.optimizer_state_dict()
    trials, tuned = run.sync.trials, run.sync.tuned
    return {"weights": run.end(), "optimizer": kept, "fusions": fusions, "trials": trials, "tuned": tuned}


def train_plainly(optimizer_name: str) -> dict[str, Any]:
    run = Run(Averaged, optimizer_name, backwards())
    run.steps(range(STEPS))
    return {"weights": state(run.model), "optimizer": run.optimizer.state_dict()}


def assert_only_buckets_change(optimizer: str, world_size: int, settings: dict[str, Any]) -> None:
    """Asserts that weights and the optimizer's state are plain ones: bit for bit on two ranks."""
    cases = {"plain": partial(train_plainly, optimizer), "dear": partial(train, optimizer, settings)}
    outcomes = launch_cases(cases, world_size)
    plain, first = outcomes["plain"][0], outcomes["dear"][0]
    for outcome in outcomes["dear"]:
        assert outcome["tuned"]
        assert outcome["trials"] == first["trials"]
        assert outcome["fusions"] == first["fusions"]
        assert len(outcome["trials"]) == 5
        assert len(dict.fromkeys(outcome["fusions"])) >= 3
        assert outcome["fusions"][-1] == min(outcome["trials"], key=lambda trial: trial.seconds).fusion
        assert_same(outcome["weights"], plain["weights"], exact=world_size == 2)
        assert_same(outcome["weights"], first["weights"])
        assert outcome["optimizer"]["param_groups"] == plain["optimizer"]["param_groups"]
        assert outcome["optimizer"]["state"].keys() == plain["optimizer"]["state"].keys()
        for index, kept in plain["optimizer"]["state"].items():
            assert list(outcome["optimizer"]["state"][index]) == list(kept)
            assert_same(outcome["optimizer"]["state"][index], kept, exact=world_size == 2)


def test_buckets_change_and_nothing_else_does() -> None:
    assert_only_buckets_change("adamw", 2, {"fusion": "bo", "update": "sharded"})


@pytest.mark.parametrize("kind", ["random", "grid"])
def test_searches_stay_in_their_ranges(kind: str) -> None:
    search, trials = SEARCHES[kind](Fusion(bucket_mb=25), 2, 64, 13), [Trial(Fusion(bucket_mb=25), 1.0)]
    while not search.converged(trials):
        trials.append(Trial(search.suggest(trials), 1.0))
    assert len(trials) == 13
    sizes = [(trial.fusion.bucket_mb or 0, trial.fusion.edge_mb or 0) for trial in trials[1:]]
    assert len(set(sizes)) == 12
    assert all(2 <= size < 64.01 and size / 16.01 < edge <= size for size, edge in sizes)
    assert max(size for size, _ in sizes) > 32
    assert min(size for size, _ in sizes) < 8
