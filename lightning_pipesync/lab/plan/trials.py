"""Runs methods as they are predicted, in turns."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipesync.core.torch_private import has_memory, is_dtensor, store_of
from lightning_pipesync.lab.bench.candidates import Candidate, ddp, hsdp, make_candidate, time_candidates
from lightning_pipesync.lab.bench.models import BenchModel
from lightning_pipesync.lab.plan.model import EACH_RANK, PlanSettings, Replicas
from lightning_pipesync.lab.plan.predictions import is_baseline
from lightning_pipesync.lab.predictions.entry import Prediction
from lightning_pipesync.lab.predictions.registry import lab_of

T = TypeVar("T")

#: Seconds after which a rank that does not answer counts as lost, so that no trial lasts for ever.
TIMEOUT_S = 120.0

#: How many exact predictions are run, besides DDP, and how many other trainings.
PROVEN = 2


def candidate_of(prediction: Prediction, model: BenchModel, replicas: Replicas = EACH_RANK) -> Candidate:
    """Returns a candidate with the settings of a prediction; ValueError if the method cannot train the model.

    The model is sharded as the method needs it.
    """
    if prediction.method == "ddp":
        return ddp(model, **prediction.settings)
    if prediction.method == "hsdp":
        return hsdp(model)
    declared = lab_of(prediction.method).trial({**prediction.settings, "timeout_s": TIMEOUT_S})
    return make_candidate(prediction.method, declared, **replicas.arguments)(model)


def to_prove(predictions: Sequence[Prediction], runs: Callable[[Prediction], bool]) -> list[Prediction]:
    """Returns the baseline, the best of the exact predictions, and the best of the other trainings, each of these once.

    ``runs`` tries one, and returns whether it can be run: the next best replaces one that cannot.
    """
    in_order = sorted(predictions, key=lambda one: one.seconds)
    chosen = [one for one in predictions if is_baseline(one) and runs(one)]
    exact = (one for one in in_order if one.exact and not is_baseline(one) and runs(one))
    chosen += islice(exact, PROVEN)
    others: dict[str, Prediction] = {}
    for one in in_order:
        if len(others) < PROVEN and not one.exact and one.title not in others and runs(one):
            others[one.title] = one
    return [*chosen, *others.values()]


def resident_bytes() -> int:
    """Returns the bytes of all tensors of this process, and of gradients; without those of a graph."""
    gc.collect()
    tensors: list[Tensor] = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
    # A DTensor's memory is that of its local tensor.
    tensors = [one for one in tensors if one.layout == torch.strided and has_memory(one) and not is_dtensor(one)]
    tensors += [one.grad for one in tensors if one.is_leaf and one.grad is not None]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


def run_in_turns(
    chosen: Sequence[Prediction],
    settings: PlanSettings,
    progress: Callable[[str], object],
    replicas: Replicas = EACH_RANK,
) -> dict[str, dict[str, Any]]:
    """Runs steps of each method; a collective call. It returns what :meth:`Trials.time` does."""
    trials = Trials(settings, replicas)
    for one in chosen:
        trials.begin(one)
    return trials.time(progress)


class Trials:
    """Steps of several methods, in turns: all stay in memory. What does not fit beside the others is not run."""

    def __init__(self, settings: PlanSettings, replicas: Replicas = EACH_RANK) -> None:
        self._settings, self._replicas = settings, replicas
        self._outcomes: dict[str, dict[str, Any]] = {}
        self._trials: list[_Trial] = []
        self._is_full = False

    def begin(self, one: Prediction) -> bool:
        """Takes the first steps with a method; returns whether all ranks could. A collective call."""
        if self._is_full:
            return False
        torch.manual_seed(0)
        before = resident_bytes()
        trial = _Trial(one.name, partial(self._make, one))
        trial.prepare()
        trial.begin()
        trial.drain()
        if trial.error is None:
            self._trials.append(trial)
            self._outcomes[one.name] = {"resident_bytes": resident_bytes() - before}
            return True
        if trial.error.startswith(torch.OutOfMemoryError.__name__) and (others := len(self._trials)):
            self._is_full = True
            trial.error = f"does not fit in memory beside {others} others, which are run in turns: {trial.error}"
        self._outcomes[one.name] = {"error": trial.error}
        return False

    def time(self, progress: Callable[[str], object]) -> dict[str, dict[str, Any]]:
        """Times steps of the methods that have begun, in turns, and ends them; a collective call.

        Returns by name the ``seconds`` of a step in each round, and the ``resident_bytes`` of this rank's tensors
        between two steps; or the ``error`` of a method that failed, the same on all ranks.
        """
        timed = time_candidates(self._trials, self._settings.steps, self._settings.rounds, progress)
        for trial in self._trials:
            if trial.error is None:
                self._outcomes[trial.name]["seconds"] = timed[trial.name].seconds
            else:
                self._outcomes[trial.name] = {"error": trial.error}
        return self._outcomes

    def _make(self, one: Prediction) -> Candidate:
        mesh = self._replicas.mesh if is_baseline(one) else self._replicas.within
        candidate = candidate_of(one, self._settings.build(mesh), self._replicas)
        if candidate.transport is not None:  # the ranks agree in the default group on what has failed, and go on
            candidate.transport.keep_other_groups()
        return candidate


class _Trial(Candidate):
    """A candidate that may fail, as whatever the user's model raises, perhaps on one rank alone.

    It has the ``error`` then, and is closed, which tells the others. ``drain`` is a collective call, after which all
    ranks have the same error.
    """

    error: str | None = None
    _candidate: Candidate | None = None

    def __init__(self, name: str, make: Callable[[], Candidate]) -> None:
        self.name = name
        try:
            self._candidate = make()
            self.period = self._candidate.period
        except Exception as error:
            self._fail(error)

    def prepare(self) -> None:
        self._attempt(lambda candidate: candidate.prepare())

    def begin(self) -> None:
        self._attempt(lambda candidate: candidate.begin())

    def step(self) -> None:
        self._attempt(lambda candidate: candidate.step())

    def drain(self) -> None:
        self._attempt(lambda candidate: candidate.drain())
        self.error = _first_of_all(self.name, self.error)
        if self.error is not None:
            self.close()

    def close(self) -> None:
        candidate, self._candidate = self._candidate, None
        if candidate is not None:
            candidate.close()

    def _attempt(self, action: Callable[[Candidate], object]) -> None:
        if self._candidate is not None:
            try:
                action(self._candidate)
            except Exception as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.error = f"{type(error).__name__}: {' '.join(str(error).split())}"
        self.close()


def _first_of_all(name: str, error: str | None) -> str | None:
    """Returns the error of the first rank that has one; a collective call.

    A method of this package tells all ranks that one has failed. In another library's collective operation they wait.
    So a rank that has failed enters the collective call only when all others are out of the trial, or have failed, too.

    Raises:
        RuntimeError: they are not, after :data:`TIMEOUT_S`.
    """
    assert dist.group.WORLD is not None
    world_size, store = dist.get_world_size(), store_of(dist.group.WORLD)
    key = f"trial/{name}/out/{store.add(f'trial/{name}/calls/{dist.get_rank()}', 1)}"
    store.add(key, 1)
    deadline = time.monotonic() + TIMEOUT_S
    while error is not None and store.add(key, 0) < world_size:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{name} failed on rank {dist.get_rank()}, while other ranks wait in it: {error}")
        time.sleep(0.01)
    return next(filter(None, gathered(error)), None)


def gathered(value: T) -> list[T]:
    """Returns what each rank has; a collective call."""
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, value)
    return everyones
