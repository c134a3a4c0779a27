"""SelSync where a step is skipped, or the method is misused: all ranks go on, or an error on all says why not."""

from __future__ import annotations

import math
import warnings
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipesync import SelSync
from lightning_pipesync.methods.replicas import trigger
from lightning_pipesync.methods.replicas.gradient_change import FIRST_DELTA
from lightning_pipesync.methods.selsync import SelSyncConfig
from tests.nightly.methods.test_selsync_state import AGGREGATIONS, FAR, begin
from tests.support.case_table import launch_cases
from tests.support.harness import assert_raised, raised
from tests.support.models import Run, assert_same, loss, seeded_mlp, state

# --- steps that are skipped -------------------------------------------------------------------------------------------

SKIPPED = (0, 4, 5, 9)


def skip(way: str, aggregation: str) -> tuple[list[float], list[bool], dict[str, Tensor]]:
    """Steps SKIPPED are skipped in a way, or (accumulated) their gradients are added to the next ones."""
    run = Run(SelSync, delta=0.2, smoothing=0.3, window=3, aggregation=aggregation)
    if way == "late flags":  # as on CUDA, where they are sent with the update
        run.sync.transport.device = torch.device("cuda")
    changes, synchronized = [], []
    for i in range(14):
        if i in SKIPPED and way == "not measured":
            continue
        loss(run.model, i, dist.get_rank()).backward()
        for _ in range(1 + (i in SKIPPED)):  # it may well be clipped twice
            run.sync.clip(1.0)
        if i not in SKIPPED:
            run.sync.step()
            changes.append(run.sync.last.relative_change)
            synchronized.append(run.sync.last.synchronized)
        if i not in SKIPPED or way != "accumulated":
            run.optimizer.zero_grad(set_to_none=way != "set to zero")
    own = state(run.model)
    run.end()
    return changes, synchronized, own


def test_a_step_that_all_ranks_skip_was_never_measured() -> None:
    """The same decisions and the same weights, bit for bit; only what is accumulated is another gradient."""
    ways = ("not measured", "set to None", "set to zero", "accumulated", "late flags")
    kinds = list(product(ways, AGGREGATIONS))
    outcomes = launch_cases({kind: partial(skip, *kind) for kind in kinds}, 2)
    for way, aggregation in kinds[2:]:
        for rank, (changes, synchronized, weights) in enumerate(outcomes[way, aggregation]):
            expected = outcomes["not measured", aggregation][rank]
            assert 1 < sum(expected[1]) < len(expected[1]), "the test must see both kinds of step"
            if way == "accumulated":
                assert changes != expected[0], "the sum is measured"
                assert synchronized == outcomes[way, aggregation][0][1]
            else:
                assert (changes, synchronized) == expected[:2], way
                assert_same(weights, expected[2], way)


def named(aggregation: str, delta: float, late: bool) -> bool:
    """Returns whether ranks can still talk when one of them has skipped a step."""
    return aggregation == "gradients" or delta > 0 or late


def skip_alone(aggregation: str, delta: float, late: bool, then: str) -> tuple[Any, int]:
    """Rank 1 skips a step; the first one was synchronized."""
    run = Run(SelSync, delta=delta, aggregation=aggregation, timeout_s=60 if named(aggregation, delta, late) else 5)
    if late:
        run.sync.transport.device = torch.device("cuda")

    def train_on() -> None:
        for i in range(2 if then == "flush" else 8):
            run.backward(i)
            run.sync.clip(1.0)
            if i != 1 or dist.get_rank() != 1:
                run.sync.step()
        run.sync.flush()

    outcome = raised(train_on)
    run.sync.detach(0.1)
    dist.barrier()
    return outcome, run.sync.num_local_steps + run.sync.num_synchronized_steps


def test_a_step_that_one_rank_skips_is_an_error_on_all() -> None:
    """Named where ranks can still talk; after timeout_s where one waits for an average that the other has skipped."""
    kinds = [*product(AGGREGATIONS, (0.0, FAR), (False,), ("step", "flush")), ("parameters", 0.0, True, "step")]
    outcomes = launch_cases({kind: partial(skip_alone, *kind) for kind in kinds}, 2)  # type: ignore[arg-type]
    for kind in kinds:
        words = "have not skipped the same steps of SGD" if named(*kind[:3]) else ""
        for outcome, steps in outcomes[kind]:
            assert_raised(outcome, "RuntimeError", words)
            assert steps <= 2


def measure_twice(within: bool) -> tuple[tuple[str, str] | None, bool]:
    """Measures a gradient twice: by a closure that is evaluated twice, or with nothing in between."""
    run = Run(SelSync, delta=math.inf)

    def evaluate_twice() -> None:
        for i in range(2):
            if within or i == 0:
                loss(run.model, i, 0).backward()
            run.sync.reduce()

    outcome = raised(lambda: run.sync.step(evaluate_twice) if within else evaluate_twice())
    loss(run.model, 0, 0).backward()
    run.sync.step()
    run.sync.detach()
    return outcome, math.isinf(run.sync.last.relative_change)


# --- what would part the ranks ----------------------------------------------------------------------------------------


def start_sparse() -> tuple[str, str] | None:
    """None waits for the one that has raised."""
    model = nn.Sequential(nn.Embedding(4, 4, sparse=dist.get_rank() == 1), nn.Linear(4, 2))
    return raised(lambda: begin(model, timeout_s=20))


def start_frozen() -> tuple[str, str] | None:
    return raised(lambda: SelSync(seeded_mlp(), torch.optim.SGD([{"params": []}])))


def set_delta(first: float) -> tuple[Any, list[float], int]:
    """What is raised where delta is set during training; deltas after resumptions; and synchronized steps then."""
    run = Run(SelSync, delta=first)
    run.steps(range(4))
    before = run.sync.state_dict()
    refused = raised(lambda: setattr(run.sync, "delta", 0.0))
    run = run.resumed(seeded_mlp(seed=1))
    deltas, synchronized = [run.sync.delta], run.sync.num_synchronized_steps
    run.steps(range(4, 8))
    synchronized = run.sync.num_synchronized_steps - synchronized
    run.sync.load_state_dict(before)
    saved = run.sync.state_dict()
    run.sync.detach()
    other = Run(SelSync, delta=5.0)
    other.sync.load_state_dict(saved)
    deltas += [run.sync.delta, other.sync.delta]
    other.sync.detach()
    return refused, deltas, synchronized


def resume_with(before: dict[str, Any], after: dict[str, Any]) -> tuple[tuple[str, str] | None, float]:
    """Returns what is raised, and delta."""
    saved, resumed = (Run(SelSync, "adamw", **settings) for settings in (before, after))
    refused = raised(lambda: resumed.sync.load_state_dict(saved.sync.state_dict()))
    delta = resumed.sync.delta
    saved.sync.detach()
    resumed.sync.detach()
    return refused, delta


def stay_local(delta: float) -> list[str]:
    run = begin(lr=0.001, delta=delta)
    with warnings.catch_warnings(record=True) as caught, mock.patch.object(trigger, "MANY_LOCAL_STEPS", 5):
        warnings.simplefilter("always")
        run.steps(range(12))
    run.sync.detach()
    return [str(warning.message) for warning in caught if "local steps" in str(warning.message)]


def test_misuse_is_named() -> None:
    outcomes = launch_cases(
        {
            "within": partial(measure_twice, True),
            "between": partial(measure_twice, False),
            "sparse": start_sparse,
            "frozen": start_frozen,
            "set": partial(set_delta, FAR),
            "set after no flags": partial(set_delta, math.inf),
            "auto": partial(resume_with, {"delta": 0.3}, {}),
            "given": partial(resume_with, {}, {"delta": 0.3}),
            "outer": partial(resume_with, {}, {"outer_momentum": 0.3}),
            **{delta: partial(stay_local, delta) for delta in (FAR, math.inf, 0.0)},
        },
        2,
    )
    for rank in range(2):
        assert_raised(outcomes["within"][rank][0], "RuntimeError", "evaluate a closure only once")
        assert outcomes["between"][rank] == (None, True), "the measurement of the gradient that was added to is undone"
        assert_raised(outcomes["sparse"][rank], "ValueError", "sparse=True", *(["Rank 1 "] if rank == 0 else []))
        assert_raised(outcomes["frozen"][rank], "ValueError", "nothing to train")
        assert outcomes["set"][rank] == (None, [0.0, FAR, 5.0], 4), "resumed, unless the setting is another"
        refused, deltas, _ = outcomes["set after no flags"][rank]
        assert_raised(refused, "ValueError", "delta=0.0", "delta=inf")
        assert deltas == [math.inf, math.inf, 5.0]
        assert outcomes["auto"][rank] == (None, FIRST_DELTA * SelSyncConfig.smoothing), "found anew"
        assert outcomes["given"][rank] == (None, 0.3)
        assert_raised(outcomes["outer"][rank][0], "ValueError", "'outer_momentum': 0.3", "'outer_momentum': 0.0")
    [said], nothing = outcomes[FAR]
    assert "delta=1e+09" in said, "out of reach: told once, by one rank"
    assert nothing == []
    assert outcomes[math.inf] == outcomes[0.0] == [[], []]
