"""Runs the methods that are predicted to be best, in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from lightning_pipesync.bench.candidate import Candidate
from lightning_pipesync.bench.candidates import makers
from lightning_pipesync.bench.models import BenchModel
from lightning_pipesync.bench.round_robin import time_round_robin
from lightning_pipesync.plan.model import PlanSettings
from lightning_pipesync.plan.predictions import Prediction

#: How many of the best exact and inexact methods are run, besides DDP.
PROVEN = 2

#: What is not run: SelSync's steps depend on the gradient, and those of learners of servers are not the same for all.
UNPROVEN = ("selsync", "parameter_server")


def to_prove(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Returns DDP, and the best of the exact and of the other methods, except :data:`UNPROVEN`."""
    ranked = sorted(predictions, key=lambda one: one.seconds)
    of_kind = {
        exact: [one for one in ranked if one.exact == exact and one.method not in ("ddp", *UNPROVEN)]
        for exact in (True, False)
    }
    ddp = [one for one in ranked if one.method == "ddp"]
    return [*ddp, *of_kind[True][:PROVEN], *of_kind[False][:PROVEN]]


def run_in_turns(
    chosen: Sequence[Prediction], settings: PlanSettings, progress: Callable[[str], object]
) -> dict[str, dict[str, Any]]:
    """Runs steps of each method in turns; a collective call.

    Returns:
        By name the ``seconds`` of a step in each round, or the ``error`` of a method that cannot train this model.
    """
    outcomes: dict[str, dict[str, Any]] = {}
    candidates: dict[str, Candidate] = {}
    for one in chosen:
        torch.manual_seed(0)
        try:
            candidates[one.name] = candidate = _candidate(one, settings.build())
            candidate.prepare()
        except (ValueError, RuntimeError) as error:
            outcomes[one.name] = {"error": f"{type(error).__name__}: {error}"}
            candidates.pop(one.name, None)
    # Whole periods: the average at their end is part of what a step takes.
    periods = {one.name: int(one.settings.get("period", 1)) for one in chosen}
    steps = {name: -(-settings.steps // periods[name]) * periods[name] for name in candidates}

    def run(name: str) -> None:
        for _ in range(steps[name]):
            candidates[name].step()

    def after(name: str) -> None:
        candidates[name].drain()
        progress(name)

    timed = time_round_robin(
        {name: partial(run, name) for name in candidates},
        settings.rounds,
        before=lambda name: None if periods[name] > 1 else candidates[name].begin(),
        after=after,
    )
    for name, candidate in candidates.items():
        candidate.close()
        outcomes[name] = {"seconds": [seconds / steps[name] for seconds in timed[name].seconds]}
    return {one.name: outcomes[one.name] for one in chosen}


def _candidate(prediction: Prediction, model: BenchModel) -> Candidate:
    size = prediction.settings.get("bucket_mb", 25.0)
    (make,) = makers(["ddp"] if prediction.method == "ddp" else [prediction.name], [size])
    return make(model)
