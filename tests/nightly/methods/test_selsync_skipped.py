"""SelSync where a gradient is measured, and the step is then skipped: by all ranks, or by one alone."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipesync.methods.selsync import SelSync
from tests.support.harness import assert_raised, on_ranks, raised
from tests.support.models import Run, assert_same, loss, state

STEPS = 14
SKIPPED = (0, 4, 5, 9)
AGGREGATIONS = ("parameters", "gradients")
WAYS = ("not measured", "set to None", "set to zero", "accumulated", "late flags")


def train(way: str, aggregation: str) -> tuple[list[float], list[bool], dict[str, Tensor]]:
    """Steps SKIPPED are skipped in a way, or (accumulated) their gradients are added to the next ones."""
    run = Run(SelSync, delta=0.2, smoothing=0.3, window=3, aggregation=aggregation)
    model, optimizer, sync = run.model, run.optimizer, run.sync
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


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_step_that_all_ranks_skip_was_never_measured(aggregation: str) -> None:
    """The same decisions and the same weights, bit for bit; only what is accumulated is another gradient."""
    outcomes = {way: on_ranks(train, 2, way, aggregation) for way in WAYS}
    for rank, (changes, synchronized, weights) in enumerate(outcomes["not measured"]):
        assert 1 < sum(synchronized) < len(synchronized), "the test must see both kinds of step"
        for way in ("set to None", "set to zero", "late flags"):
            also_changes, also_synchronized, also_weights = outcomes[way][rank]
            assert also_changes == changes, way
            assert also_synchronized == synchronized, way
            assert_same(also_weights, weights, way)
        accumulated = outcomes["accumulated"][rank]
        assert accumulated[0] != changes, "the sum is measured"
        assert accumulated[1] == outcomes["accumulated"][0][1]


def named(aggregation: str, delta: float, late: bool) -> bool:
    """Returns whether ranks can still talk when one of them has skipped a step."""
    return aggregation == "gradients" or delta > 0 or late


def skip_alone(aggregation: str, delta: float, late: bool, then: str) -> list[Any]:
    """Rank 1 skips a step; the first one was synchronized."""
    run = Run(SelSync, delta=delta, aggregation=aggregation, timeout_s=60 if named(aggregation, delta, late) else 5)
    model, sync, rank = run.model, run.sync, dist.get_rank()
    if late:
        sync.transport.device = torch.device("cuda")

    def train_on() -> None:
        for i in range(2 if then == "flush" else 8):
            model.zero_grad()
            loss(model, i, rank).backward()
            sync.clip(1.0)
            if i != 1 or rank != 1:
                sync.step()
        sync.flush()

    outcome = raised(train_on)
    sync.detach(0.1)
    return [outcome, sync.num_local_steps + sync.num_synchronized_steps]


@pytest.mark.parametrize(
    ("aggregation", "delta", "late", "then"),
    [*product(AGGREGATIONS, (0.0, 1e9), (False,), ("step", "flush")), ("parameters", 0.0, True, "step")],
)
def test_a_step_that_one_rank_skips_is_an_error_on_all(aggregation: str, delta: float, late: bool, then: str) -> None:
    """Named where ranks can still talk; after timeout_s where one waits for an average that the other has skipped."""
    words = "have not skipped the same steps of SGD" if named(aggregation, delta, late) else ""
    for outcome, steps in on_ranks(skip_alone, 2, aggregation, delta, late, then):
        assert_raised(outcome, "RuntimeError", words)
        assert steps <= 2


def measure_twice(within: bool) -> tuple[tuple[str, str] | None, bool]:
    """Measures a gradient twice: by a closure that is evaluated twice, or with nothing in between."""
    run = Run(SelSync, delta=math.inf)
    model, sync = run.model, run.sync

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


def test_a_gradient_is_measured_once() -> None:
    """What changes it within its step is an error; a second call with nothing in between does nothing."""
    [(within, _)] = on_ranks(measure_twice, 1, True)
    assert_raised(within, "RuntimeError", "evaluate a closure only once")
    [(between, first)] = on_ranks(measure_twice, 1, False)
    assert between is None
    assert first, "the measurement of the gradient that was added to is undone"
