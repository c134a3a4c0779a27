"""Runs the methods that are predicted to be best, in turns."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_pipesync.bench.candidate import Candidate
from lightning_pipesync.bench.round_robin import time_round_robin
from lightning_pipesync.plan.candidates import candidate_of
from lightning_pipesync.plan.model import PlanSettings
from lightning_pipesync.plan.predictions import Prediction
from lightning_pipesync.plan.ranks import gathered

#: How many exact predictions are run, besides DDP, and how many other methods.
PROVEN = 2


def to_prove(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Returns DDP, the best of the exact predictions, and the best of the other methods, each at its best."""
    in_order = sorted(predictions, key=lambda one: one.seconds)
    exact = [one for one in in_order if one.exact and one.method != "ddp"]
    others: dict[str, Prediction] = {}
    for one in in_order:
        if not one.exact:
            others.setdefault(one.method, one)
    ddp = next(one for one in predictions if one.method == "ddp")
    return [ddp, *exact[:PROVEN], *list(others.values())[:PROVEN]]


def resident_bytes() -> int:
    """Returns the bytes of all tensors of this process, and of gradients; without those of a graph."""
    gc.collect()
    tensors: list[Tensor] = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
    tensors = [one for one in tensors if one.layout == torch.strided and not one.is_meta]
    tensors += [one.grad for one in tensors if one.is_leaf and one.grad is not None]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


def run_in_turns(
    chosen: Sequence[Prediction], settings: PlanSettings, progress: Callable[[str], object]
) -> dict[str, dict[str, Any]]:
    """Runs steps of each method in turns; a collective call.

    Returns:
        By name the ``seconds`` of a step in each round, and the ``resident_bytes`` of this rank's tensors between two
        steps; or the ``error`` of a method that cannot train this model.
    """
    outcomes: dict[str, dict[str, Any]] = {}
    candidates: dict[str, Candidate] = {}
    for one in chosen:
        torch.manual_seed(0)
        before = resident_bytes()
        candidate, error = _try(one, settings)
        failed = next(filter(None, gathered(error)), None)  # all ranks go on with the same ones
        if candidate is not None and failed is None:
            candidates[one.name] = candidate
            outcomes[one.name] = {"resident_bytes": resident_bytes() - before}
        else:
            outcomes[one.name] = {"error": failed}
            if candidate is not None:
                candidate.close()
    # Whole periods: the average at their end is part of what a step takes.
    steps = {name: -(-settings.steps // one.period) * one.period for name, one in candidates.items()}

    def run(name: str) -> None:
        for _ in range(steps[name]):
            candidates[name].step()

    def after(name: str) -> None:
        candidates[name].drain()
        progress(name)

    timed = time_round_robin(
        {name: partial(run, name) for name in candidates},
        settings.rounds,
        before=lambda name: candidates[name].begin(),
        after=after,
    )
    for name, candidate in candidates.items():
        candidate.close()
        outcomes[name]["seconds"] = [seconds / steps[name] for seconds in timed[name].seconds]
    return {one.name: outcomes[one.name] for one in chosen}


def _try(one: Prediction, settings: PlanSettings) -> tuple[Candidate | None, str | None]:
    """Takes the first steps with a method; returns what is left to be closed, and what has failed."""
    candidate = None
    try:
        candidate = candidate_of(one, settings.build())
        candidate.prepare()
        candidate.begin()
        candidate.drain()
    except Exception as error:  # whatever the user's model raises, perhaps on this rank alone
        if candidate is not None:
            candidate.close()  # which tells the others
        return None, f"{type(error).__name__}: {error}"
    return candidate, None
