"""Local SGD on real processes against its papers in one process, bit for bit; what it sends, and what it refuses."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adam

from lightning_pipesync import LocalSGD
from tests.references.local_sgd import simulate
from tests.references.selsync import mean
from tests.support.case_table import launch_cases
from tests.support.harness import assert_raised, on_ranks, raised
from tests.support.models import OPTIMIZERS, Run, assert_same, loss, seeded_mlp, state

STEPS = 13
FRAGMENTS = [["0.weight", "0.bias"], ["1.weight", "1.bias", "3.weight", "3.bias"]]  # of about the same size
OUTER = {
    "sgd": partial(SGD, lr=0.9, momentum=0.4),
    "nesterov": partial(SGD, lr=0.7, momentum=0.9, nesterov=True),
    "adam": partial(Adam, lr=0.01),
}
STREAMING: dict[str, Any] = {"period": 4, "fragments": 2, "overlap_steps": 3}

#: By name: optimizer and settings.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "FedAvg": ("sgd", {"period": 3}),
    "FedAvg, a share": ("adamw", {"period": 2, "participation": 0.67}),
    "post-local": ("sgd", {"period": 3, "warmup_steps": 4}),
    "SlowMo": ("sgd", {"period": 4, "outer_optimizer": "sgd", "outer_lr": 0.9, "outer_momentum": 0.4}),
    "DiLoCo": ("adamw", {"period": 3, "outer_optimizer": "nesterov"}),
    "DiLoCo after a warm-up": ("adamw", {"period": 3, "outer_optimizer": "nesterov", "warmup_steps": 2}),
    "outer Adam": ("sgd", {"period": 3, "outer_optimizer": "adam", "outer_lr": 0.01}),
    "streaming": ("sgd", {**STREAMING, "mixing_factor": 0.3, "outer_optimizer": "nesterov"}),
    "streaming averages": ("sgd", {**STREAMING, "period": 3, "mixing_factor": 0.5}),
    "CoCoD-SGD": ("sgd", {"period": 4, "overlap_steps": 4}),
    "streaming, with the progress since": ("adamw", {**STREAMING, "outer_optimizer": "nesterov"}),
    "fragments": ("sgd", {"period": 4, "fragments": 2}),
    "EASGD": ("sgd", {"period": 2, "outer_optimizer": "elastic"}),
    "EASGD, overlapped": ("sgd", {"period": 4, "overlap_steps": 3, "outer_optimizer": "elastic"}),
    "EASGD, a given force": ("adamw", {"period": 2, "outer_optimizer": "elastic", "elastic_force": 0.2}),
    "ring": ("adamw", {"period": 3, "neighbors": "ring"}),
    "D-PSGD": ("sgd", {"period": 1, "neighbors": "ring", "overlap_steps": 1}),
    "ring in fragments": ("sgd", {**STREAMING, "neighbors": "ring"}),
    "pairs": ("sgd", {"period": 1, "neighbors": "random_pairs"}),
    "pairs in fragments": ("sgd", {"period": 4, "neighbors": "random_pairs", "fragments": 2}),
    "pairs, overlapped": ("adamw", {"period": 3, "neighbors": "random_pairs", "overlap_steps": 2}),
}


def for_reference(settings: dict[str, Any], replicas: int, fragments: list[list[str]]) -> dict[str, Any]:
    """Returns what the simulation is given."""
    given = {key: settings[key] for key in ("period", "warmup_steps", "overlap_steps", "neighbors") if key in settings}
    given["mixing_factor"] = settings.get("mixing_factor", "progress")
    if "fragments" in settings:
        given["fragments"] = fragments
    if "participation" in settings:
        given["participants"] = int(settings["participation"] * replicas)
    outer = settings.get("outer_optimizer")
    if outer == "elastic":
        given["elastic_force"] = force = settings.get("elastic_force", 0.9 / replicas)
        given["make_outer"] = partial(SGD, lr=replicas * force)
    elif outer is not None:
        given["make_outer"] = OUTER[outer]
    return given


def train(name: str, resumed_at: int | None) -> dict[str, Any]:
    """Trains STEPS steps, with weights for an evaluation, and back, in between."""
    optimizer, settings = CASES[name]
    run = Run(
        LocalSGD, optimizer, seeded_mlp(dist.get_rank(), batch_norm=True), bucket_mb=1e-4, lr_scale=1.0, **settings
    )
    for i in range(STEPS):
        if i == resumed_at:
            run = run.resumed(seeded_mlp(9, batch_norm=True))
        run.step(i)
        if i == 4:
            run.sync.flush()
            run.sync.resume()
    return {"own": state(run.model), "consolidated": run.end()}


@pytest.mark.parametrize(("world_size", "resumed_at"), [(2, None), (3, 7), (4, None)])
def test_follows_the_papers(world_size: int, resumed_at: int | None) -> None:
    """Weights and buffers, of each paper's algorithm; resumed in the middle of a round.

    The consolidated weights are EASGD's center; of neighbors they are the average of all replicas.
    """
    gossip = [name for name, (_, settings) in CASES.items() if "neighbors" in settings]
    names = [name for name in (CASES if world_size < 4 else gossip) if world_size > 2 or "share" not in name]
    outcomes = launch_cases({name: partial(train, name, resumed_at) for name in names}, world_size)
    for name in names:
        optimizer, settings = CASES[name]
        given = for_reference(settings, world_size, FRAGMENTS)
        model, make_optimizer = seeded_mlp(batch_norm=True), OPTIMIZERS[optimizer]
        replicas, global_model = simulate(model, make_optimizer, loss, world_size=world_size, num_steps=STEPS, **given)
        for rank, outcome in enumerate(outcomes[name]):
            assert_same(outcome["own"], state(replicas[rank]), f"{name}, rank {rank}")
            assert_same(outcome["consolidated"], outcomes[name][0]["consolidated"], f"{name}, rank {rank}")
        expected = dict(global_model.named_parameters()) if "elastic_force" in given else {}
        if name in gossip:
            of_ranks = zip(*(replica.named_parameters() for replica in replicas), strict=True)
            expected = {each[0][0]: mean([p for _, p in each]) for each in of_ranks}
        assert_same(outcomes[name][0]["consolidated"], expected, f"{name}, consolidated")


# --- what is averaged, and what is sent -------------------------------------------------------------------------------


def train_one_of_two() -> list[Any]:
    """Trains with two optimizers, of which the second one alone steps; returns the buffers after a round."""
    model = seeded_mlp(batch_norm=True)
    first, second = SGD(model[0].parameters(), lr=0.1), SGD(model[3].parameters(), lr=0.1)
    sync = LocalSGD(model, [first, second], period=3)
    for step in range(STEPS - 1):
        loss(model, step, dist.get_rank()).backward()
        sync.step(optimizer=second)
    buffers = [buffer.clone() for buffer in model.buffers()]
    sync.flush()
    sync.detach()
    return buffers


def moments(average: bool) -> list[Any]:
    run = Run(LocalSGD, "adamw", period=2, average_optimizer_states=average)
    run.steps(range(4))
    run.sync.detach()
    return [run.optimizer.state[p]["exp_avg"] for p in run.model.parameters()]


def with_other_rates() -> tuple[str, str] | None:
    """Returns what is raised if the learning rate falls on one rank alone."""
    run = Run(LocalSGD, "sgd", period=4, timeout_s=20)
    run.steps(range(3))
    if dist.get_rank():
        run.optimizer.param_groups[0]["lr"] /= 4
    error = raised(lambda: run.step(3))
    run.sync.detach()
    return error


def test_ranks_whose_learning_rates_differ_are_told() -> None:
    """Their next periods would differ, and they would wait for each other."""
    for outcome in on_ranks(with_other_rates, 2):
        assert_raised(outcome, "RuntimeError", "Rank 1 and rank 0", "learning rates that differ", "follow_lr=False")


def test_states_are_averaged_if_asked_for_and_buffers_while_an_optimizer_pauses() -> None:
    cases = {"buffers": train_one_of_two, "averaged": partial(moments, True), "own": partial(moments, False)}
    outcomes = launch_cases(cases, 2)
    for name in cases:
        assert all(map(torch.equal, *outcomes[name])) == (name != "own"), name


def traffic_of(settings: dict[str, Any]) -> dict[str, float]:
    """Returns by how much each metric grows in 12 steps with 4 layers of 100 * 100 weights, in shares of their size."""
    model = nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(4)))
    run = Run(LocalSGD, "sgd", model, **settings)
    before = run.sync.metrics()
    for _ in range(12):
        run.optimizer.zero_grad()
        model(torch.ones(2, 100)).sum().backward()
        run.sync.step()
    after = run.sync.metrics()
    run.sync.detach()
    size = 4 * 100 * 100 * 4 / 2**20
    return {name: (value - before[name]) / (size if "mib" in name else 1) for name, value in after.items()}


#: By the number of ranks: settings, and how many models a rank sends in 12 steps.
TRAFFIC: dict[int, list[tuple[dict[str, Any], float]]] = {
    2: [
        ({"period": 4}, 3),
        ({"period": 12, "fragments": 4}, 1),
        ({"period": 100}, 0),
        ({"period": 4, "compression": "int8"}, 0.75),
        ({"period": 4, "neighbors": "ring"}, 3),
    ],
    3: [({"period": 4, "neighbors": "random_pairs"}, 2)],  # in each round one sends nothing
    4: [
        ({"period": 4, "neighbors": "ring"}, 6),
        ({"period": 4, "neighbors": "random_pairs"}, 3),
        ({"period": 4}, 4.5),
    ],
}


@pytest.mark.parametrize("world_size", TRAFFIC)
def test_nothing_is_sent_between_averages(world_size: int) -> None:
    """And each neighbor gets the weights."""
    cases = {str(settings): partial(traffic_of, settings) for settings, _ in TRAFFIC[world_size]}
    outcomes = launch_cases(cases, world_size)
    for settings, models in TRAFFIC[world_size]:
        sent = [grown["mib_sent"] for grown in outcomes[str(settings)]]
        if world_size == 3:
            sent = [sum(sent) / 3]
        assert sent == [pytest.approx(models, rel=0.02, abs=1e-3)] * len(sent), settings


# --- refusals ---------------------------------------------------------------------------------------------------------

GOSSIP, SPARSE = {"neighbors": "ring"}, {"compression": "chunked_topk"}
WRONG: list[tuple[dict[str, Any], list[str]]] = [
    ({"period": "often"}, ["period", "'often'", "'0.25 epoch'", "'selsync'"]),
    ({"period": "selsync", "smoothing": 2.0}, ["smoothing", "2.0"]),
    ({"participation": 0.3}, ["participation=0.3", "2 replicas", "0.5"]),
    ({"participation": 0.5, "compression": "int8"}, ["participation=0.5", "int8"]),
    ({"overlap_steps": 5, "period": 4}, ["overlap_steps=5", "period=4"]),
    ({"fragments": 3}, ["fragments=3", "2 layers"]),
    ({"outer_optimizer": "nesterov", "outer_lr": 0.0}, ["outer_lr", "0.0"]),
    ({"outer_optimizer": "lamb"}, ["outer_optimizer", "'lamb'", "nesterov"]),
    ({"outer_optimizer": "elastic", "participation": 0.5}, ["elastic", "participation"]),
    ({"outer_optimizer": "elastic", "elastic_force": 0.6}, ["elastic_force=0.6", "2 replicas", "0.5"]),
    ({"ranks_per_replica": 2}, ["ranks_per_replica=2"]),
    ({"neighbors": "torus"}, ["neighbors", "'torus'", "random_pairs"]),
    ({**GOSSIP, "outer_optimizer": "nesterov"}, ["neighbors", "outer_optimizer='nesterov'", "'none'"]),
    ({**GOSSIP, "participation": 0.5}, ["neighbors", "participation=0.5"]),
    ({**GOSSIP, "period": "selsync"}, ["neighbors", "period='selsync'", "period=16"]),
    ({**GOSSIP, "compression": "int8"}, ["neighbors", "compression='int8'", "'none'"]),
    ({**GOSSIP, "average_optimizer_states": True}, ["neighbors", "average_optimizer_states=True"]),
    ({**GOSSIP, "lighthouse": "host0:29510"}, ["neighbors", "lighthouse='host0:29510'"]),
    ({**SPARSE, "outer_optimizer": "nesterov"}, ["residual_decay", "outer_optimizer='nesterov'", "='sgd'"]),
    ({**SPARSE, "outer_optimizer": "adam"}, ["outer_optimizer='adam'", "compression='int4'"]),
    ({**SPARSE, "outer_optimizer": "elastic"}, ["outer_optimizer='elastic'", "compression='int4'"]),
    ({**SPARSE, "outer_optimizer": "sgd", "outer_momentum": 0.4}, ["outer_momentum=0.4", "outer_momentum=0.0"]),
    ({**SPARSE, "participation": 0.5}, ["participation=0.5", "chunked_topk"]),
    ({**SPARSE, **GOSSIP}, ["neighbors='ring'", "chunked_topk"]),
    ({**SPARSE, "residual_decay": 0.0}, ["residual_decay", "0.0"]),
    ({**SPARSE, "residual_decay": 1.5}, ["residual_decay", "1.5"]),
    ({**SPARSE, "residual_decay": "paper"}, ["residual_decay", "'paper'", "'auto'"]),
]


def attach_each(wrong: list[dict[str, Any]]) -> list[tuple[str, str] | None]:
    different = "ring" if dist.get_rank() else "random_pairs"
    return [raised(lambda given=given: Run(LocalSGD, **given)) for given in [*wrong, {"neighbors": different}]]


def test_bad_input_is_named_on_every_rank() -> None:
    for outcomes in on_ranks(attach_each, 2, [settings for settings, _ in WRONG]):
        *of_settings, of_different = outcomes
        for (_, words), outcome in zip(WRONG, of_settings, strict=True):
            assert_raised(outcome, "ValueError", *words)
        assert_raised(of_different, "ValueError", "neighbors", "'ring'", "'random_pairs'")
