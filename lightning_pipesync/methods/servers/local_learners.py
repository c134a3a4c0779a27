"""Learners that take local steps, and push what several of them have accrued: Downpour, EASGD, asynchronous DiLoCo."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipesync.core.parameters import load_optimizer_state
from lightning_pipesync.methods.hyperparameters import current
from lightning_pipesync.methods.servers.learners import CancellingLearner, Learner
from lightning_pipesync.methods.servers.messages import Accrued, Fetch, Gradient, Request, UpdateSettings

T = TypeVar("T")


class _LocalLearner(Learner):
    """Takes local steps, and pushes what several of them have accrued."""

    moves_weights = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._first_step, self._fetches = 1, list[Fetch]()  # since the last push

    def _fetch_of(self, step: int, before_pass: bool) -> Fetch:
        """Returns what the log has of the weights that this learner has just got."""
        return Fetch(step, self.version, before_pass, self._of_shards)

    def _push_accrued(self, present: list[list[bool]]) -> None:
        """Pushes the packed buckets."""
        accrued = Accrued(self._first_step, tuple(self._fetches))
        self._push(Gradient(self._rank, self.steps, self.version, accrued=accrued, of_shards=self._of_shards), present)
        self._first_step, self._fetches = self.steps + 1, []

    def _copy_of_weights(self) -> list[Tensor]:
        """Returns the weights that this learner has now, packed."""
        for bucket in self._buckets:
            bucket.pack_values()
        return [bucket.packed.clone() for bucket in self._buckets]


class DownpourLearner(_LocalLearner):
    """Takes local steps of plain SGD, and pushes accrued gradients and fetches weights under computation.

    Weights that it requests at the end of a step arrive at the end of the next one, before that step's local update
    (Dean et al., NIPS 2012, Algorithm 7.1; lecture, "Downpour - Pseudocode").
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._accrued = [torch.zeros_like(bucket.packed) for bucket in self._buckets]
        self._has_requested = False
        self._forget_gradients()

    def retire(self) -> None:
        self._take_requested()
        if self._first_step <= self.steps:
            self._push_gradients()
        super().retire()
        self._fetches = [self._fetch_of(self.steps + 1, before_pass=True)]

    def retire_to_reload(self, weights_loaded: bool) -> None:
        if self._has_requested:
            self._router.await_weights()
            self._has_requested = False
        if not weights_loaded and self._first_step <= self.steps:
            self._push_gradients()
        self._forget_gradients()
        self._first_step, self._fetches = self.steps + 1, []
        super().retire_to_reload(weights_loaded)

    @torch.no_grad()
    def _push_and_fetch(self, gradient: Gradient) -> None:
        for i, bucket in enumerate(self._buckets):
            present = bucket.pack()
            self._present[i] = [had or has for had, has in zip(self._present[i], present, strict=True)]
            self._accrued[i].add_(bucket.packed)
        if self._take_requested():
            self._fetches.append(self._fetch_of(self.steps, before_pass=False))
        for bucket in self._buckets:
            group = self._optimizers[0].param_groups[bucket.group[1]]
            alpha = group["lr"] if group.get("maximize") else -group["lr"]
            for member in bucket.members:
                if member.tensor.grad is not None:
                    member.tensor.add_(member.tensor.grad, alpha=alpha)
        if self.steps % self._config.n_push == 0:
            self._push_gradients()
        if self.steps % self._config.n_fetch == 0:
            self._router.request(Request.FETCH)
            self._has_requested = True

    def _take_requested(self) -> bool:
        """Copies requested weights into the parameters; returns whether there were any."""
        requested, self._has_requested = self._has_requested, False
        if requested:
            self._await_weights()
        return requested

    def _push_gradients(self) -> None:
        for bucket, total in zip(self._buckets, self._accrued, strict=True):
            bucket.packed.copy_(total)
        self._push_accrued(self._present)
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        for total in self._accrued:
            total.zero_()
        self._present = [[False] * len(bucket.members) for bucket in self._buckets]


class EASGDLearner(_LocalLearner):
    """Trains a replica with the user's optimizer; every ``period`` steps the replica and the center attract each other.

    The center is the servers' weights (asynchronous EASGD, Zhang et al., NIPS 2015, Algorithm 1).
    """

    keeps_replica = owns_optimizer = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._kept: list[Tensor] = []  # the replica, while the parameters are the center
        self._resumes = False  # with the replica of a checkpoint

    def step(self, index: int, update: Callable[[], T] | None) -> T | None:
        result = self._user_steps.update_own(index, update)
        self.steps += 1
        if self.steps % self._config.period == 0:
            for bucket in self._buckets:
                bucket.pack_values()
            self._push_accrued([[True] * len(bucket.members) for bucket in self._buckets])
            self._receive()
            for bucket in self._buckets:
                bucket.subtract()
        return result

    def begin_from_flushed(self) -> None:
        """Makes the center, which the parameters hold, the replica."""
        self._kept = []
        self._fetches.append(self._fetch_of(self.steps + 1, before_pass=True))

    def keep_replica(self) -> None:
        self._kept = self._copy_of_weights()

    def restore_replica(self) -> None:
        for bucket, kept in zip(self._buckets, self._kept, strict=bool(self._kept)):
            bucket.unpack_from(kept)
        self._kept = []

    def begin_from_loaded(self) -> None:
        if self._resumes:
            self.restore_replica()
        else:
            self.begin_from_flushed()
        self._resumes = False

    def state_dict(self) -> dict[str, Any]:
        kept = [flat.to("cpu", copy=True) for flat in self._kept]
        replica = {"own": kept, "first_step": self._first_step, "optimizer": self._optimizers[0].state_dict()}
        return {**super().state_dict(), "replica": replica}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        replica = state["replica"]
        pairs = zip(self._buckets, replica["own"], strict=True)
        self._kept = [kept.to(bucket.packed.device, copy=True) for bucket, kept in pairs]
        self._first_step, self._resumes = replica["first_step"], True
        load_optimizer_state(self._optimizers[0], replica["optimizer"])


class DiLoCoLearner(_LocalLearner):
    """Trains with the user's optimizer, and pushes how far ``period`` steps have moved the weights that it had fetched.

    It continues from the weights that the outer optimizer has made of that (asynchronous DiLoCo, arXiv 2401.09135;
    Decoupled DiLoCo, arXiv 2604.21428). The movement is the fetched weights minus its own: an outer gradient. With
    ``overlap_steps`` it trains on until they are there, and adds to them what these steps have moved its own.
    """

    owns_optimizer = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.outer: Optimizer = self._config.outer_optimizer(self._optimizers[0])
        self._pushed: list[Tensor] = []  # its weights at the push for which it will take weights later

    def step(self, index: int, update: Callable[[], T] | None) -> T | None:
        result = self._user_steps.update_own(index, update)
        self.steps += 1
        since_push = self.steps - self._first_step + 1
        if since_push == self._config.overlap_steps:
            self._take_weights()
        if since_push == self._config.period:
            self._exchange()
        return result

    def retire(self) -> None:
        self._take_weights()
        if self._first_step <= self.steps:
            self._exchange()
            self._take_weights()
        super().retire()
        self._fetches = []

    def retire_to_reload(self, weights_loaded: bool) -> None:
        if self._pushed:
            self._receive()
        self._pushed, self._fetches, self._first_step = [], [], self.steps + 1
        super().retire_to_reload(weights_loaded)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "optimizer": self._optimizers[0].state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._first_step = self.steps + 1
        load_optimizer_state(self._optimizers[0], state["optimizer"])

    def _exchange(self) -> None:
        """Pushes the movement, and takes the weights that the outer optimizer makes of it, now or in later steps."""
        for bucket in self._buckets:
            bucket.pack_movement()
        self._push_accrued([[True] * len(bucket.members) for bucket in self._buckets])
        if self._config.overlap_steps == 0:
            self._await_weights()
        else:
            self._pushed = self._copy_of_weights()

    def _take_weights(self) -> None:
        """Waits for the weights, if any are to come, and moves on from them as it has moved since the push."""
        if not self._pushed:
            return
        self._receive()
        for bucket, pushed in zip(self._buckets, self._pushed, strict=True):
            bucket.unpack_moved_on(pushed)
        self._pushed = []
        self._fetches.append(self._fetch_of(self.steps, before_pass=False))

    def _settings_of(self, index: int) -> UpdateSettings:
        return UpdateSettings(current(self.outer))


#: By policy, the kind of learner, if not the base.
LEARNERS: dict[str, type[Learner]] = {
    "k_sync": CancellingLearner,
    "k_batch_sync": CancellingLearner,
    "downpour": DownpourLearner,
    "easgd": EASGDLearner,
    "diloco": DiLoCoLearner,
}
