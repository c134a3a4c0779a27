"""Plans run methods as they are predicted, in turns: what fails is told, and what cannot be run is replaced."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipesync.core.cost import LinkCost
from lightning_pipesync.lab.bench.candidate import Candidate
from lightning_pipesync.lab.bench.method_candidate import MethodCandidate
from lightning_pipesync.lab.bench.models import BenchModel, stand_in
from lightning_pipesync.lab.plan import trials
from lightning_pipesync.lab.plan.model import PlanSettings
from lightning_pipesync.lab.plan.predictions import predict
from lightning_pipesync.lab.plan.replicas import Replicas
from lightning_pipesync.lab.plan.stand_ins import with_refusals
from lightning_pipesync.lab.plan.trials import candidate_of, run_in_turns, to_prove
from lightning_pipesync.methods.laboratory import Prediction
from tests.nightly.lab.test_plan import WORK, cluster, small_model
from tests.support.case_table import launch_cases
from tests.support.harness import assert_raised, launch, on_ranks, raised


class Failing(Candidate):
    """Fails in its first step, on all ranks."""

    def step(self) -> None:
        raise RuntimeError("no way")


class FailingLater(MethodCandidate):
    """Fails in the third step that is timed."""

    _left: int | None = None

    def drain(self) -> None:
        super().drain()
        self._left = 4 if self._left is None else self._left  # one of them begins a measurement

    def step(self, batch: Any = None) -> None:
        if self._left == 0:
            raise RuntimeError("no way")
        self._left = None if self._left is None else self._left - 1
        super().step(batch)


def prove(later_on: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """The second method fails on some ranks in a step that is timed, or on all in its first one."""
    chosen = [Prediction("ddp", {"bucket_mb": 1.0}), Prediction("dear", {"fusion": "buffer"}), Prediction("pipe_sgd")]
    make = trials.candidate_of

    def candidate(one: Prediction, model: BenchModel, replicas: Replicas) -> Candidate:
        if one is chosen[1] and not later_on:
            return Failing("", model)
        made = make(one, model, replicas)
        if one is chosen[1] and dist.get_rank() in later_on:
            made.__class__ = FailingLater
        return made

    with patch.object(trials, "candidate_of", candidate):
        return run_in_turns(
            chosen, PlanSettings("tests.nightly.lab.test_plan:small_model", 1.0, 1.0, 2, 2), lambda _: None
        )


def test_a_trial_that_fails_is_a_row_with_its_error() -> None:
    """On all ranks alike, though on one of them it may be the other's error."""
    outcomes = launch_cases({ranks: partial(prove, ranks) for ranks in ((), (0, 1), (1,))}, 2)
    for measured in (measured for ranks in ((), (0, 1), (1,)) for measured in outcomes[ranks]):
        assert list(measured) == ["ddp:bucket_mb=1.0", "dear:fusion=buffer", "pipe_sgd"]
        assert list(measured["dear:fusion=buffer"]) == ["error"]
        assert "no way" in measured["dear:fusion=buffer"]["error"]
        assert len(measured["ddp:bucket_mb=1.0"]["seconds"]) == len(measured["pipe_sgd"]["seconds"]) == 2
    for ranks in ((0, 1), (1,)):
        first, second = outcomes[ranks]
        assert first["dear:fusion=buffer"] == second["dear:fusion=buffer"]
    for measured in outcomes[()]:
        assert measured["dear:fusion=buffer"] == {"error": "RuntimeError: no way"}
        size = 4 * (64 * 64 + 64 + 64 + 1)
        assert 3 * size < measured["ddp:bucket_mb=1.0"]["resident_bytes"] < measured["pipe_sgd"]["resident_bytes"]
        assert measured["pipe_sgd"]["resident_bytes"] < 12 * size


class Large(Candidate):
    """Does not fit in the memory that is left, on one rank."""

    def step(self) -> None:
        if dist.get_rank() == 1:
            raise torch.OutOfMemoryError("no memory")


def fill() -> tuple[list[bool], dict[str, dict[str, Any]]]:
    make, chosen = (
        trials.candidate_of,
        [Prediction("ddp", {"bucket_mb": 1.0}), Prediction("dear"), Prediction("pipe_sgd")],
    )
    candidates = {"dear": lambda one, model, replicas: Large("", model)}
    with patch.object(trials, "candidate_of", lambda one, *rest: candidates.get(one.method, make)(one, *rest)):
        of_all = trials.Trials(PlanSettings("tests.nightly.lab.test_plan:small_model", 1.0, 1.0, 2, 2))
        return [of_all.begin(one) for one in chosen], of_all.time(lambda _: None)


def test_what_does_not_fit_beside_others_is_no_fault_of_the_method() -> None:
    """And the others are not tried any more: they would not fit either."""
    for began, measured in on_ranks(fill, 2):
        assert began == [True, False, False]
        assert list(measured) == ["ddp:bucket_mb=1.0", "dear"]
        assert len(measured["ddp:bucket_mb=1.0"]["seconds"]) == 2
        assert measured["dear"]["error"] == (
            "does not fit in memory beside 1 others, which are run in turns: OutOfMemoryError: no memory"
        )


def fail_in_ddp() -> Any:
    """One rank fails before the backward pass, in which DDP has the others wait for it."""

    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            raise RuntimeError("no way")
        return module(batch).square().mean()

    module, batch, _ = small_model()
    model = BenchModel("", module, [], lambda rank: batch, loss)
    with patch.object(PlanSettings, "build", lambda *_: model), patch.object(trials, "TIMEOUT_S", 3.0):
        trials.Trials(PlanSettings()).begin(Prediction("ddp", {"bucket_mb": 1.0}))


def test_a_rank_that_fails_alone_in_ddp_says_so() -> None:
    """Nobody can tell the others, which its launcher ends."""
    outcomes = launch(partial(raised, fail_in_ddp), 2, group_timeout_s=10)
    said = "ddp:bucket_mb=1.0 failed on rank 1, while other ranks wait in it: RuntimeError: no way"
    assert_raised(outcomes[1], "RuntimeError", said)


def test_ddp_and_dear_are_also_proven_with_larger_buckets() -> None:
    """DDP with its default, DeAR with four times as large ones, and each method that is not exact once."""
    chosen = to_prove(predict(WORK, cluster(1e7)), lambda one: True)
    assert [one.method for one in chosen] == ["ddp", "ddp", "dear", "dear", "local_sgd", "selsync"]
    assert chosen[0].settings["bucket_mb"] < chosen[1].settings["bucket_mb"] == 25
    assert chosen[3].settings["bucket_mb"] >= 4 * chosen[2].settings["bucket_mb"]
    assert chosen[4].seconds <= chosen[5].seconds


def test_the_next_best_is_run_where_one_cannot() -> None:
    """Of exact methods and of the others; DDP has no next."""
    predictions = [one for one in predict(WORK, cluster(1e7)) if one.method != "averaging"]  # another test's
    first = to_prove(predictions, lambda one: True)
    second = to_prove(predictions, lambda one: one not in (first[2], first[4]))
    assert [one.method for one in second] == ["ddp", "ddp", "dear", "local_sgd", "selsync"]
    assert second[2] is first[3]
    assert second[3].seconds >= first[4].seconds
    without = to_prove(predictions, lambda one: one.method not in ("ddp", "local_sgd"))
    assert [one.method for one in without] == ["dear", "dear", "selsync", "pipe_sgd"]


def refused_by(num_layers: int) -> tuple[dict[str, str], list[str]]:
    """What methods refuse for a model of so many layers; and what is predicted and cannot be attached."""
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(num_layers)))
    at = replace(cluster(1e7, 2), exchanges={"averages": dict.fromkeys(("none", "int8", "int4"), LinkCost(1e-3, 1e-7))})
    work = with_refusals(WORK, at, module)
    failed = []
    for one in predict(work, at):
        try:
            candidate_of(one, stand_in(module)).close()
        except ValueError as error:
            failed.append(str(error))
    return dict(work.refused), failed


def test_what_a_method_refuses_is_not_planned() -> None:
    """Two layers cannot be averaged in four fragments, whatever the period."""
    outcomes = launch_cases({layers: partial(refused_by, layers) for layers in (2, 4)}, 2)
    assert outcomes[4] == [({}, [])] * 2
    for refused, failed in outcomes[2]:
        assert failed == []
        assert refused
        for name, reason in refused.items():
            assert "fragments=4" in name
            assert "fragments=4 is more than the 2 layers" in reason
