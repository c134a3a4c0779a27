"""Local SGD on real processes against the simulation, bit for bit, resumed in the middle of a round."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adam

from lightning_pipesync import LocalSGD
from tests.references.local_sgd import average_where_different, simulate
from tests.support.harness import assert_raised, on_ranks, raised
from tests.support.models import OPTIMIZERS, Run, assert_same, loss, seeded_mlp, state

STEPS = 13
FIRST, SECOND = ["0.weight", "0.bias"], ["1.weight", "1.bias", "3.weight", "3.bias"]  # of about the same size
OUTER = {
    "sgd": partial(SGD, lr=0.9, momentum=0.4),
    "nesterov": partial(SGD, lr=0.7, momentum=0.9, nesterov=True),
    "adam": partial(Adam, lr=0.01),
}

#: By name: optimizer and settings.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "FedAvg": ("sgd", {"period": 3}),
    "FedAvg, a share": ("adamw", {"period": 2, "participation": 0.67}),
    "post-local": ("sgd", {"period": 3, "warmup_steps": 4}),
    "SlowMo": ("sgd", {"period": 4, "outer_optimizer": "sgd", "outer_lr": 0.9, "outer_momentum": 0.4}),
    "DiLoCo": ("adamw", {"period": 3, "outer_optimizer": "nesterov"}),
    "DiLoCo after a warm-up": ("adamw", {"period": 3, "outer_optimizer": "nesterov", "warmup_steps": 2}),
    "outer Adam": ("sgd", {"period": 3, "outer_optimizer": "adam", "outer_lr": 0.01}),
    "streaming": (
        "sgd",
        {"period": 4, "fragments": 2, "overlap_steps": 3, "mixing_factor": 0.3, "outer_optimizer": "nesterov"},
    ),
    "streaming averages": ("sgd", {"period": 3, "fragments": 2, "overlap_steps": 3, "mixing_factor": 0.5}),
    "CoCoD-SGD": ("sgd", {"period": 4, "overlap_steps": 4}),
    "streaming, with the progress since": (
        "adamw",
        {"period": 4, "fragments": 2, "overlap_steps": 3, "outer_optimizer": "nesterov"},
    ),
    "fragments": ("sgd", {"period": 4, "fragments": 2}),
    "EASGD": ("sgd", {"period": 2, "outer_optimizer": "elastic"}),
    "EASGD, overlapped": ("sgd", {"period": 4, "overlap_steps": 3, "outer_optimizer": "elastic"}),
    "EASGD, a given force": ("adamw", {"period": 2, "outer_optimizer": "elastic", "elastic_force": 0.2}),
}


def for_reference(settings: dict[str, Any], replicas: int, fragments: list[list[str]]) -> dict[str, Any]:
    """Returns what the simulation is given."""
    given = {key: settings[key] for key in ("period", "warmup_steps", "overlap_steps") if key in settings}
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


def train(optimizer_name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Trains STEPS steps; a new model, optimizer and method go on in the middle of a round."""
    settings = {"bucket_mb": 1e-4, "lr_scale": 1.0, **settings}
    run = Run(LocalSGD, optimizer_name, seeded_mlp(batch_norm=True), **settings)
    for i in range(STEPS):
        if i == STEPS // 2 + 1:
            run = run.resumed(seeded_mlp(1, batch_norm=True))
        run.step(i)
        if i == 4:  # weights for an evaluation, and back
            run.sync.flush()
            run.sync.resume()
    return {"own": state(run.model), "consolidated": run.end()}


@pytest.mark.parametrize(
    ("name", "world_size"),
    [(name, ranks) for name in CASES for ranks in (2, 3, 4) if ranks > 2 or "share" not in name],
)
def test_follows_the_papers(name: str, world_size: int) -> None:
    """Bit for bit, of each paper's algorithm; resumed in the middle of a round."""
    optimizer, settings = CASES[name]
    reference = for_reference(settings, world_size, [FIRST, SECOND])
    model, make_optimizer = seeded_mlp(batch_norm=True), OPTIMIZERS[optimizer]
    replicas, global_model = simulate(model, make_optimizer, loss, world_size=world_size, num_steps=STEPS, **reference)
    for rank, outcome in enumerate(on_ranks(train, world_size, optimizer, settings)):
        assert_same(outcome["own"], state(replicas[rank]), rank)
        if "elastic_force" in reference:
            center = {key: p.detach() for key, p in global_model.named_parameters()}
            assert_same(outcome["consolidated"], center, rank)


def go_on_without_resume(optimizer_name: str, settings: dict[str, Any], flush_after: int) -> dict[str, Tensor]:
    run = Run(LocalSGD, optimizer_name, seeded_mlp(batch_norm=True), bucket_mb=1e-4, lr_scale=1.0, **settings)
    run.steps(range(flush_after))
    run.sync.flush()
    run.steps(range(flush_after, STEPS))
    return run.end()


@pytest.mark.parametrize("flush_after", [4, 5, 6])  # at the start of averages, while they are under way, and between
@pytest.mark.parametrize("name", [name for name in CASES if "EASGD" not in name])
def test_goes_on_after_a_flush_that_is_not_undone(name: str, flush_after: int) -> None:
    """Averages under way are applied, so that the outer step moves the weights, and once."""
    optimizer, settings = CASES[name]
    reference = for_reference(settings, 3, [FIRST, SECOND])
    reference["goes_on_after"] = flush_after - reference.get("warmup_steps", 0)
    model, make_optimizer = seeded_mlp(batch_norm=True), OPTIMIZERS[optimizer]
    replicas, _ = simulate(model, make_optimizer, loss, world_size=3, num_steps=STEPS, **reference)
    average_where_different(replicas)
    for rank, weights in enumerate(on_ranks(go_on_without_resume, 3, optimizer, settings, flush_after)):
        assert_same(weights, state(replicas[0]), rank)


def drift_apart(evaluates: bool, neighbors: str = "all") -> tuple[str, str] | None:
    """Rank 1 takes a step more than the others before a validation, or validates while they train."""
    run = Run(LocalSGD, neighbors=neighbors, period=4, timeout_s=10)

    def diverge() -> None:
        run.steps(range(3 if evaluates else 2))
        if dist.get_rank() == 1 and not evaluates:
            run.step(3)
        if dist.get_rank() == 1 or not evaluates:
            run.sync.flush()
        run.step(4)

    outcome = raised(diverge)
    run.sync.detach(timeout_s=1.0)
    dist.barrier()
    return outcome


@pytest.mark.parametrize("evaluates", [False, True])
def test_ranks_that_differ_are_named(evaluates: bool) -> None:
    for outcome in on_ranks(drift_apart, 3, evaluates):
        assert_raised(outcome, "RuntimeError", "ank 1")


def optimizer_states_after(average: bool) -> list[Tensor]:
    run = Run(LocalSGD, "adamw", period=2, average_optimizer_states=average)
    run.steps(range(4))
    run.sync.detach()
    return [run.optimizer.state[p]["exp_avg"] for p in run.model.parameters()]


@pytest.mark.parametrize("average", [False, True])
def test_optimizer_states_are_averaged_if_asked_for(average: bool) -> None:
    first, second = on_ranks(optimizer_states_after, 2, average)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)) == average


def buffers_while_another_pauses() -> dict[str, Tensor]:
    """Trains with two optimizers, of which the second one alone steps; returns the buffers after a round."""
    model = seeded_mlp(batch_norm=True)
    first, second = SGD(model[0].parameters(), lr=0.1), SGD(model[3].parameters(), lr=0.1)
    sync = LocalSGD(model, [first, second], period=3)
    for step in range(STEPS - 1):
        loss(model, step, dist.get_rank()).backward()
        sync.step(optimizer=second)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    sync.flush()
    sync.detach()
    return buffers


def test_buffers_are_averaged_while_an_optimizer_pauses() -> None:
    one, other = on_ranks(buffers_while_another_pauses, 2)
    assert one.keys() > {"1.running_mean"}
    assert_same(one, other)


def save(folder: Path) -> None:
    run = Run(LocalSGD, period=3)
    run.steps(range(STEPS))
    torch.save(run.sync.state_dict(), folder / f"{dist.get_rank()}.pt")
    run.end()


def load(folder: Path) -> tuple[str, str] | None:
    run = Run(LocalSGD, period=3)
    saved = torch.load(folder / f"{dist.get_rank()}.pt", weights_only=True)
    outcome = raised(lambda: run.sync.load_state_dict(saved))
    run.end()
    return outcome


def test_a_state_of_more_ranks_is_refused(tmp_path: Path) -> None:
    on_ranks(save, 3, tmp_path)
    assert on_ranks(load, 3, tmp_path) == [None, None, None]
    for rank, outcome in enumerate(on_ranks(load, 2, tmp_path)):
        assert_raised(outcome, "ValueError", f"of rank {rank} of 3, and there are 2", "resume with as many")


def traffic_of(settings: dict[str, Any]) -> dict[str, float]:
    """Returns by how much each metric grows in 12 steps with 4 layers of 100 * 100 weights."""
    model = nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(4)))
    run = Run(LocalSGD, "sgd", model, **settings)
    before = run.sync.metrics()
    for _ in range(12):
        run.optimizer.zero_grad()
        model(torch.ones(2, 100)).sum().backward()
        run.sync.step()
    after = run.sync.metrics()
    run.sync.detach()
    return {name: value - before[name] for name, value in after.items()}


@pytest.mark.parametrize(
    ("settings", "exchanges"),
    [
        ({"period": 4}, 3),
        ({"period": 12, "fragments": 4}, 1),
        ({"period": 100}, 0),
        ({"period": 4, "compression": "int8"}, 0.75),
    ],
)
def test_nothing_is_sent_between_averages(settings: dict[str, Any], exchanges: float) -> None:
    size = 4 * 100 * 100 * 4 / 2**20
    for sent in on_ranks(traffic_of, 2, settings):
        assert sent["mib_sent"] == pytest.approx(exchanges * size, rel=0.02, abs=1e-4)


WRONG: list[tuple[dict[str, Any], list[str]]] = [
    ({"period": 0}, ["period", "0"]),
    ({"period": 2.5}, ["period", "2.5"]),
    ({"period": "often"}, ["period", "'often'", "'0.25 epoch'", "'selsync'"]),
    ({"period": "selsync", "smoothing": 2.0}, ["smoothing", "2.0"]),
    ({"participation": 0.0}, ["participation", "0.0"]),
    ({"participation": 0.3}, ["participation=0.3", "2 replicas", "0.5"]),
    ({"overlap_steps": 5, "period": 4}, ["overlap_steps=5", "period=4"]),
    ({"fragments": 3}, ["fragments=3", "2 layers"]),
    ({"outer_optimizer": "nesterov", "outer_lr": 0.0}, ["outer_lr", "0.0"]),
    ({"outer_optimizer": "nesterov", "outer_lr": -1.0}, ["outer_lr", "-1.0"]),
    ({"outer_optimizer": "lamb"}, ["outer_optimizer", "'lamb'", "nesterov"]),
    ({"outer_optimizer": "elastic", "participation": 0.5}, ["elastic", "participation"]),
    ({"elastic_force": 1.5}, ["elastic_force", "1.5"]),
    ({"outer_optimizer": "elastic", "elastic_force": 0.6}, ["elastic_force=0.6", "2 replicas", "0.5"]),
    ({"participation": 0.5, "compression": "int8"}, ["participation=0.5", "int8"]),
    ({"mixing_factor": 2.0}, ["mixing_factor", "2.0"]),
    ({"mixing_factor": "half"}, ["mixing_factor", "'half'", "'progress'"]),
    ({"lr_scale": 0.0}, ["lr_scale", "0.0"]),
    ({"lr_scale": "large"}, ["lr_scale", "'large'"]),
]


def attach(settings: dict[str, Any]) -> tuple[str, str] | None:
    return raised(lambda: Run(LocalSGD, **settings))


@pytest.mark.parametrize(("settings", "words"), WRONG)
def test_bad_input_is_named_on_every_rank(settings: dict[str, Any], words: list[str]) -> None:
    for outcome in on_ranks(attach, 2, settings):
        assert_raised(outcome, "ValueError", *words)
