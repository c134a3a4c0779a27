"""A configuration on real ranks, and what becomes of it."""

from __future__ import annotations

import copy
import io
import traceback
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipesync.methods.sync_method import SyncMethod
from tests.fuzz.configuration import Configuration
from tests.fuzz.methods import METHODS, TIMEOUT_S, Check, Settings
from tests.fuzz.reference import Reference
from tests.fuzz.training import MAX_NORM, MAX_VALUE, Replica, Seen, Worker, train

#: Of float64, where sums are made in another order; Adam and its like make some rounding errors larger.
TOLERANCE = 1e-6


class Rank(Worker):
    """This rank, with the method."""

    def __init__(self, configuration: Configuration) -> None:
        super().__init__(configuration)
        self.rank = dist.get_rank()
        self.replica = Replica(configuration, self.rank)
        self.seen = {self.rank: {}}
        self.replica.pretrain()
        self.name = configuration.method
        if self.rank and not configuration.pretrained_steps:  # rank 0's weights count
            with torch.no_grad():
                for p in self.replica.model.parameters():
                    p.add_(0.1)
        self.sync = self.attach(configuration.method, configuration.settings)

    def attach(self, method: str, settings: Settings) -> SyncMethod:
        self.name, self.settings = method, settings
        return METHODS[method].type(self.replica.model, self.replica.optimizers, timeout_s=TIMEOUT_S, **settings)

    @property
    def replicas(self) -> list[Replica]:
        return [self.replica]

    def passes(self, step: int) -> None:
        for micro in range(self.configuration.accumulate):
            last = micro == self.configuration.accumulate - 1
            with nullcontext() if last or not self.configuration.no_sync else self.sync.no_sync():
                self.replica.backward(step, micro)

    def reduce(self) -> None:
        for optimizer in self.replica.optimizers:
            self.sync.unscale(self.replica.scaler, optimizer)
        self.replica.forget_unscaling()

    def update(self) -> None:
        scaler, clip = self.replica.scaler, self.configuration.clip
        for optimizer in self.replica.optimizers:
            if scaler is not None:
                self.sync.unscale(scaler, optimizer)
            if clip == "norm":
                self.sync.clip(MAX_NORM, optimizer)
            elif clip == "value":
                self.sync.clip_value(MAX_VALUE, optimizer)
            if scaler is None:
                self.sync.step(optimizer=optimizer)
            else:
                self.sync.step(partial(scaler.step, optimizer), optimizer)
        self.replica.end_step()

    def flush(self) -> None:
        self.sync.flush()

    def resume(self) -> None:
        self.sync.resume()

    def optimizer_states(self) -> list[list[Any]]:
        return [[copy.deepcopy(self.sync.optimizer_state_dict(one)) for one in self.replica.optimizers]]

    def start_anew(self) -> None:
        self.sync.flush()
        old = self.replica
        state = {
            "model": old.model.state_dict(),
            "optimizers": self.optimizer_states()[0],
            "schedulers": [scheduler.state_dict() for scheduler in old.schedulers],
            "scaler": old.scaler.state_dict() if old.scaler else {},
            "pipesync": self.sync.state_dict(),
        }
        file = io.BytesIO()
        torch.save(state, file)
        self.sync.detach()
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        self.replica = new = Replica(self.configuration, self.rank)
        self.sync = self.attach(self.name, self.settings)
        new.model.load_state_dict(saved["model"])
        for optimizer, of_optimizer in zip(new.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(of_optimizer)
        for scheduler, of_scheduler in zip(new.schedulers, saved["schedulers"], strict=True):
            scheduler.load_state_dict(of_scheduler)
        if new.scaler is not None:
            new.scaler.load_state_dict(saved["scaler"])
        self.sync.load_state_dict(saved["pipesync"])

    def reattach(self, method: str, settings: Settings) -> None:
        self.sync.flush()
        self.sync.return_optimizer_states()
        self.sync.detach()
        if METHODS[self.name].own_states:  # which the user has to make the same
            states = [[optimizer.state_dict() for optimizer in self.replica.optimizers]]
            dist.broadcast_object_list(states)
            for optimizer, state in zip(self.replica.optimizers, states[0], strict=True):
                optimizer.load_state_dict(state)
        self.sync = self.attach(method, settings)


@dataclass(frozen=True)
class Outcome:
    """What became of a configuration, the same on all ranks.

    Attributes:
        kind: how it was checked, "refused" or "failed".
        problem: by rank, for a failure.
    """

    seed: int
    kind: str
    problem: str = ""


def run(configuration: Configuration) -> Outcome:
    """Trains a configuration on all ranks and judges the result; a collective call."""
    seen, error = _attempt(configuration)
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    if any(errors):
        expected = configuration.refused + configuration.may_be_refused
        clear = [e is not None and e[0] in ("ValueError", "RuntimeError") for e in errors]
        if expected and all(clear) and all(any(words in e[1] for words in expected) for e in errors):
            return Outcome(configuration.seed, "refused")
        return _failed(configuration, [e and e[2] for e in errors])
    problem = ""
    if configuration.refused:
        problem = f"was expected to be refused with {configuration.refused}"
    elif configuration.check == Check.REFERENCE:
        reference = Reference(configuration, {name: entry.rule for name, entry in METHODS.items()})
        train(reference)
        problem = difference(seen, reference.seen[dist.get_rank()], TOLERANCE if configuration.double else 0.0)
    elif configuration.check == Check.REPETITION:
        again, _ = _attempt(configuration)
        problem = difference(again, seen, 0.0)
    agreed = {name: value for name, value in seen.items() if name.startswith(("end: ", "flush"))}
    if METHODS[configuration.used[-1][0]].own_states or configuration.check == Check.AGREEMENT:
        agreed = {name: value for name, value in agreed.items() if "optimizer" not in name}
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, agreed)
    problem = problem or (
        difference(agreed, of_ranks[0], 0.0) and f"other than rank 0: {difference(agreed, of_ranks[0], 0.0)}"
    )
    problems: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    return _failed(configuration, problems) if any(problems) else Outcome(configuration.seed, configuration.check.value)


def _attempt(configuration: Configuration) -> tuple[Seen, tuple[str, str, str] | None]:
    """Returns what was seen, and type, message and traceback of what was raised."""
    rank = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rank = Rank(configuration)
            train(rank)
        return rank.seen[rank.rank], None
    except Exception as error:
        return {}, (type(error).__name__, str(error), traceback.format_exc())
    finally:
        if rank is not None:
            rank.sync.detach()


def _failed(configuration: Configuration, problems: Sequence[str | None]) -> Outcome:
    by_rank = "\n".join(f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem)
    return Outcome(configuration.seed, "failed", f"{configuration}\n{by_rank}")


def difference(actual: Seen, expected: Seen, tolerance: float) -> str:
    """Returns the first difference, in words; empty if there is none."""
    for name in expected:
        if name not in actual:
            return f"{name} is missing"
        one, other = actual[name], expected[name]
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            if one != other and not (isinstance(one, float) and abs(one - other) <= tolerance * abs(other)):
                return f"{name} is {one!r} instead of {other!r}"
        elif one.shape != other.shape or one.dtype != other.dtype:
            return f"{name} is {one.dtype} {list(one.shape)} instead of {other.dtype} {list(other.shape)}"
        elif not torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True):
            off = (one.double() - other.double()).abs().max()
            return f"{name} is off by {off:.3g} of {other.double().abs().max():.3g}"
    return "".join(f"{name} is too much" for name in actual.keys() - expected.keys())
