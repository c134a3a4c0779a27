"""Replicas that average with neighbors, on real processes against one process, bit for bit after each step."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_pipesync import LocalSGD
from tests.quick.methods.test_local_sgd import drift_apart
from tests.references.gossip import simulate
from tests.references.selsync import mean
from tests.support.harness import DIED, assert_raised, launch, on_ranks, raised
from tests.support.lost_ranks import be_patient
from tests.support.models import OPTIMIZERS, Run, assert_same, loss, seeded_mlp, state

STEPS = 13
FRAGMENTS = [["0.weight", "0.bias"], ["1.weight", "1.bias", "3.weight", "3.bias"]]  # of about the same size

#: By name: optimizer and settings.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ring": ("sgd", {"neighbors": "ring", "period": 1}),
    "D-PSGD": ("sgd", {"neighbors": "ring", "period": 1, "overlap_steps": 1}),
    "a ring every 3 steps": ("adamw", {"neighbors": "ring", "period": 3}),
    "pairs": ("sgd", {"neighbors": "random_pairs", "period": 1}),
    "pairs every 3 steps, overlapped": ("adamw", {"neighbors": "random_pairs", "period": 3, "overlap_steps": 2}),
    "pairs in fragments": ("sgd", {"neighbors": "random_pairs", "period": 4, "fragments": 2}),
    "a ring in fragments, overlapped": (
        "sgd",
        {"neighbors": "ring", "period": 4, "fragments": 2, "overlap_steps": 3},
    ),
}


def train(optimizer: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Trains, and returns the weights after each step; a new model, optimizer and method go on within a round."""
    run = Run(LocalSGD, optimizer, seeded_mlp(batch_norm=True), bucket_mb=1e-4, lr_scale=1.0, **settings)
    weights = []
    for i in range(STEPS):
        if i == STEPS // 2 + 1:
            run = run.resumed(seeded_mlp(1, batch_norm=True))
        run.step(i)
        weights.append(state(run.model))
        if i == 4:  # weights for an evaluation, and back
            run.sync.flush()
            run.sync.resume()
    return {"weights": weights, "consolidated": run.end()}


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_follows_the_reference(name: str, world_size: int) -> None:
    """At each step; the consolidated weights are the average of all replicas, and the same on all ranks."""
    optimizer, settings = CASES[name]
    given = {**settings, **({"fragments": FRAGMENTS} if "fragments" in settings else {})}
    model, make_optimizer = seeded_mlp(batch_norm=True), OPTIMIZERS[optimizer]
    expected = simulate(model, make_optimizer, loss, world_size=world_size, num_steps=STEPS, **given)
    average = {name: mean([of_rank[name] for of_rank in expected[-1]]) for name, _ in model.named_parameters()}
    outcomes = on_ranks(train, world_size, optimizer, settings)
    for rank, outcome in enumerate(outcomes):
        for step, (own, of_step) in enumerate(zip(outcome["weights"], expected, strict=True)):
            assert_same(own, of_step[rank], f"rank {rank}, step {step}")
        assert_same(outcome["consolidated"], average, rank)
        assert_same(outcome["consolidated"], outcomes[0]["consolidated"], rank)  # buffers, too


# --- ranks that differ, and that are lost -----------------------------------------------------------------------------


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("neighbors", ["ring", "random_pairs"])
def test_ranks_that_differ_are_named_on_all(neighbors: str, evaluates: bool) -> None:
    """Also on those that are no neighbors of theirs."""
    for outcome in on_ranks(drift_apart, 4, evaluates, neighbors):
        assert_raised(outcome, "RuntimeError", "ank 1")


def lose_rank_2(neighbors: str) -> tuple[str, str] | None:
    be_patient()
    run = Run(LocalSGD, neighbors=neighbors, period=1, timeout_s=300)
    run.steps(range(3))
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    outcome = raised(lambda: run.steps(range(3, 9)))
    run.sync.detach(timeout_s=1.0)
    return outcome


@pytest.mark.parametrize("neighbors", ["ring", "random_pairs"])
def test_a_lost_rank_raises_on_all(neighbors: str) -> None:
    outcomes = launch(lose_rank_2, 4, neighbors, may_die=(2,))
    assert outcomes.pop(2) == DIED
    for outcome in outcomes:
        assert_raised(outcome, "RuntimeError", "Rank 2")


# --- what is sent -----------------------------------------------------------------------------------------------------


def traffic_of(neighbors: str) -> float:
    """Returns how many times the model's size this rank has sent in 3 rounds."""
    model = nn.Linear(100, 100, bias=False)
    run = Run(LocalSGD, "sgd", model, neighbors=neighbors, period=1)
    before = run.sync.metrics()["mib_sent"]
    for _ in range(3):
        run.optimizer.zero_grad()
        model(torch.ones(2, 100)).sum().backward()
        run.sync.step()
    sent = run.sync.metrics()["mib_sent"] - before
    run.sync.detach()
    return sent / (100 * 100 * 4 / 2**20)


@pytest.mark.parametrize(
    ("neighbors", "world_size", "models"), [("ring", 4, 6), ("ring", 2, 3), ("random_pairs", 4, 3), ("all", 4, 4.5)]
)
def test_each_neighbor_gets_the_weights(neighbors: str, world_size: int, models: float) -> None:
    assert on_ranks(traffic_of, world_size, neighbors) == [pytest.approx(models, rel=1e-3)] * world_size


def test_of_an_odd_number_one_sends_nothing_in_each_round() -> None:
    assert sum(on_ranks(traffic_of, 3, "random_pairs")) == pytest.approx(3 * 2, rel=1e-3)


# --- what does not go with it -----------------------------------------------------------------------------------------

WRONG: list[tuple[dict[str, Any], list[str]]] = [
    ({"neighbors": "torus"}, ["neighbors", "'torus'", "random_pairs"]),
    ({"outer_optimizer": "nesterov"}, ["outer_optimizer='nesterov'", "'none'"]),
    ({"participation": 0.5}, ["participation=0.5"]),
    ({"period": "selsync"}, ["period='selsync'", "period=16"]),
    ({"compression": "int8"}, ["compression='int8'", "'none'"]),
    ({"average_optimizer_states": True}, ["average_optimizer_states=True"]),
    ({"lighthouse": "host0:29510"}, ["lighthouse='host0:29510'"]),
]


def attach_each() -> list[tuple[str, str] | None]:
    outcomes = [raised(lambda given=given: Run(LocalSGD, **{"neighbors": "ring", **given})) for given, _ in WRONG]
    different = "ring" if dist.get_rank() else "random_pairs"
    return [*outcomes, raised(lambda: Run(LocalSGD, neighbors=different))]


def test_what_does_not_go_with_neighbors_is_named_on_every_rank() -> None:
    for outcomes in on_ranks(attach_each, 2):
        for (_, words), outcome in zip(WRONG, outcomes, strict=False):
            assert_raised(outcome, "ValueError", "neighbors", *words)
        assert_raised(outcomes[-1], "ValueError", "neighbors", "'ring'", "'random_pairs'")
