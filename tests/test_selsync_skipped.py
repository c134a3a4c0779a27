"""SelSync where a gradient is measured, and the step is then skipped: by all ranks, or by one alone."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipesync.methods.selsync import SelSync
from tests.harness import launch, raised
from tests.models import loss, seeded_mlp, state

STEPS = 14
SKIPPED = (0, 4, 5, 9)
AGGREGATIONS = ("parameters", "gradients")
WAYS = ("not measured", "set to None", "set to zero", "accumulated", "late flags")


def train(way: str, aggregation: str) -> tuple[list[float], list[bool], dict[str, Tensor]]:
    """Steps SKIPPED are skipped in a way, or (accumulated) their gradients are added to the next ones."""
    model = seeded_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sync = SelSync(model, optimizer, delta=0.2, smoothing=0.3, window=3, aggregation=aggregation)
    if way == "late flags":  # as on CUDA, where they are sent with the update
        sync.transport.device = torch.device("cuda")
    changes, synchronized = [], []
    for i in range(STEPS):
        if i in SKIPPED and way == "not measured":
            continue
        loss(model, i, dist.get_rank()).backward()
        if i in SKIPPED:
            for _ in range(2):  # it may well be clipped twice
                sync.clip(1.0)
            if way != "accumulated":
                optimizer.zero_grad(set_to_none=way != "set to zero")
            continue
        sync.clip(1.0)
        sync.step()
        changes.append(sync.last.relative_change)
        synchronized.append(sync.last.synchronized)
        optimizer.zero_grad()
    own = state(model)
    sync.flush()
    sync.detach()
    return changes, synchronized, own


def train_in_all_ways() -> dict[tuple[str, str], Any]:
    return {(way, aggregation): train(way, aggregation) for way, aggregation in product(WAYS, AGGREGATIONS)}


def test_a_step_that_all_ranks_skip_was_never_measured() -> None:
    """The same decisions and the same weights, bit for bit; only what is accumulated is another gradient."""
    outcomes = launch(train_in_all_ways, 2)
    for of_rank, aggregation in product(outcomes, AGGREGATIONS):
        changes, synchronized, weights = of_rank["not measured", aggregation]
        assert 1 < sum(synchronized) < len(synchronized), "the test must see both kinds of step"
        for way in ("set to None", "set to zero", "late flags"):
            also_changes, also_synchronized, also_weights = of_rank[way, aggregation]
            assert also_changes == changes, way
            assert also_synchronized == synchronized, way
            assert all(torch.equal(also_weights[name], weights[name]) for name in weights), way
        accumulated = of_rank["accumulated", aggregation]
        assert accumulated[0] != changes, "the sum is measured"
        assert accumulated[1] == outcomes[0]["accumulated", aggregation][1]


def skip_alone(aggregation: str, delta: float, late: bool, then: str) -> list[Any]:
    """Rank 1 skips a step; the first one was synchronized."""
    rank = dist.get_rank()
    model = seeded_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sync = SelSync(model, optimizer, delta=delta, aggregation=aggregation, timeout_s=3)
    if late:
        sync.transport.device = torch.device("cuda")

    def train_on() -> None:
        for i in range(2 if then == "flush" else 8):
            optimizer.zero_grad()
            loss(model, i, rank).backward()
            sync.clip(1.0)
            if i != 1 or rank != 1:
                sync.step()
        sync.flush()

    outcome = raised(train_on)
    sync.detach(0.1)
    return [outcome, sync.num_local_steps + sync.num_synchronized_steps]


CASES = [*product(AGGREGATIONS, (0.0, 1e9), (False,), ("step", "flush")), ("parameters", 0.0, True, "step")]


def skip_alone_in_all_ways() -> list[list[Any]]:
    return [skip_alone(*case) for case in CASES]


def test_a_step_that_one_rank_skips_is_an_error_on_all() -> None:
    """Named where ranks can still talk; after timeout_s where one waits for an average that the other has skipped."""
    for of_rank in launch(skip_alone_in_all_ways, 2):
        for (aggregation, delta, late, then), (outcome, steps) in zip(CASES, of_rank, strict=True):
            what = (aggregation, delta, late, then)
            assert outcome is not None, what
            assert outcome[0] == "RuntimeError", what
            assert steps <= 2, what
            if aggregation == "gradients" or delta or late:
                assert "have not skipped the same steps of SGD" in outcome[1], what


def measure_twice(within: bool) -> tuple[tuple[str, str] | None, bool]:
    """Measures a gradient twice: by a closure that is evaluated twice, or with nothing in between."""
    model = seeded_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sync = SelSync(model, optimizer, delta=math.inf)

    def evaluate_twice() -> None:
        for i in range(2):
            if within or i == 0:
                loss(model, i, 0).backward()
            sync.reduce()

    outcome = raised(lambda: sync.step(evaluate_twice) if within else evaluate_twice())
    loss(model, 0, 0).backward()
    sync.step()
    sync.detach()
    return outcome, math.isinf(sync.last.relative_change)


def measure_twice_both_ways() -> list[tuple[tuple[str, str] | None, bool]]:
    return [measure_twice(within) for within in (True, False)]


def test_a_gradient_is_measured_once() -> None:
    """What changes it within its step is an error; a second call with nothing in between does nothing."""
    (within, _), (between, first) = launch(measure_twice_both_ways, 1)[0]
    assert within is not None
    assert within[0] == "RuntimeError"
    assert "evaluate a closure only once" in within[1]
    assert between is None
    assert first, "the measurement of the gradient that was added to is undone"
