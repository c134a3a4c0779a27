"""DeAR finds the best bucket sizes: what it tries, and that weights stay DDP's while buckets change."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from lightning_pipesync.core.buckets import Fusion
from lightning_pipesync.methods.dear import DeAR
from lightning_pipesync.methods.dear.config import DeARConfig
from lightning_pipesync.methods.dear.fusion_search import SEARCHES, Trial
from lightning_pipesync.methods.dear.schedule import MeasuredStep
from tests.support.case_table import launch_cases
from tests.support.harness import on_ranks
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


SIZES = [Fusion(bucket_mb=2e-4, edge_mb=1e-4), Fusion(bucket_mb=1e-4, edge_mb=5e-5)]


def train_with_simulated_sizes(settings: dict[str, Any]) -> dict[str, Any]:
    """Trains with sizes that a simulation on rank 0 has found; resumes in the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MeasuredStep, "candidates", lambda step: SIZES if torch.distributed.get_rank() == 0 else [])
        run = Run(DeAR, "adamw", backwards(), **settings)
        fusions, tuned = [], []
        for number in range(STEPS):
            fusions.append(run.sync.fusion)
            tuned.append(run.sync.tuned)
            step(run, number)
        planned, trials, saved = run.sync.planned, run.sync.trials, run.sync.state_dict()
        fresh = Run(DeAR, "adamw", backwards(), **settings)
        fresh.sync.load_state_dict(saved)
        resumed = fresh.sync.fusion, fresh.sync.tuned
        fresh.sync.detach()
        shown = {"fusions": fusions, "tuned": tuned, "planned": planned, "trials": trials, "resumed": resumed}
        return {"weights": run.end(), **shown}


def parameters_after_a_thaw() -> list[tuple[int, bool]]:
    """How many parameters each simulation had, and whether sizes are final, before a layer is thawed and after."""
    seen: list[int] = []

    def candidates(step: MeasuredStep) -> list[Fusion]:
        seen.append(len(step.parameters))
        return SIZES

    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MeasuredStep, "candidates", candidates)
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
        optimizer = torch.optim.SGD(model[1:].parameters(), lr=0.01)
        sync = DeAR(model, optimizer)
        for _ in range(2):
            for _ in range(STEPS):
                optimizer.zero_grad()
                model(torch.ones(2, 8)).sum().backward()
                sync.step()
                await_decision(sync)
            found.append((sum(seen), sync.tuned))
            if len(found) == 1:
                optimizer.add_param_group({"params": list(model[0].parameters())})
        sync.detach()
    return found


def test_sizes_are_chosen_anew_for_other_parameters() -> None:
    rank_0, rank_1 = on_ranks(parameters_after_a_thaw, 2)
    assert rank_0 == [(4, True), (10, True)], "a simulation of 4 parameters, then one of 6"
    assert [tuned for _, tuned in rank_1] == [True, True]


def average_plainly() -> dict[str, Any]:
    run = Run(Averaged, "adamw", backwards())
    run.steps(range(STEPS))
    return state(run.model)


@pytest.mark.parametrize("settings", [{}, {"overlap": "none"}, {"update": "sharded"}, {"compression": "int8"}])
def test_the_best_of_simulated_sizes_stays(settings: dict[str, Any]) -> None:
    """All ranks compare the first size with each, once; the weights stay DDP's."""
    cases = {"plain": average_plainly, "dear": partial(train_with_simulated_sizes, settings)}
    outcomes = launch_cases(cases, 2)
    for outcome in outcomes["dear"]:
        assert [trial.fusion for trial in outcome["trials"]] == [Fusion(bucket_mb=25.0), *SIZES]
        best = min(outcome["trials"], key=lambda trial: trial.seconds).fusion
        fusions = outcome["fusions"]
        assert fusions == outcomes["dear"][0]["fusions"]
        assert fusions[:5] == [Fusion(bucket_mb=25.0)] * 5, "one warm-up, three measured, the step that ends them"
        assert list(dict.fromkeys(fusions)) == [Fusion(bucket_mb=25.0), *SIZES]
        assert fusions[-1] == best
        assert outcome["tuned"] == sorted(outcome["tuned"])
        assert outcome["tuned"][-1]
        assert outcome["planned"], "all-gathers under backward are chosen for the last buckets"
        assert outcome["resumed"] == (best, True)
        assert_same(outcome["weights"], outcomes["dear"][0]["weights"])
        if "compression" not in settings:
            assert_same(outcome["weights"], outcomes["plain"][0])


def test_sizes_that_are_set_are_not_chosen() -> None:
    for settings in ({"bucket_mb": 3.0}, {"edge_mb": 1.0}, {"fusion": "layers"}):
        assert not DeARConfig(**settings).chooses_fusion
    assert DeARConfig(bucket_mb=3.0).first_fusion() == Fusion(bucket_mb=3.0)
    assert DeARConfig(edge_mb=1.0).first_fusion() == Fusion(bucket_mb=25.0, edge_mb=1.0)


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
