"""Learners: what a rank does in a step, by policy.

They push each gradient, and continue from the weights that they then fetch; or they take local steps, and push what
several of them have accrued: Downpour, EASGD, asynchronous DiLoCo.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_pipesync.core.parameters import (
    NamedParameter,
    hook_gradient,
    load_optimizer_state,
    modules_with_parameters,
)
from lightning_pipesync.core.profiling import profiled
from lightning_pipesync.core.torch_private import mark_stepped
from lightning_pipesync.methods.hyperparameters import current
from lightning_pipesync.methods.module_hook import ModuleHook
from lightning_pipesync.methods.servers.config import ParameterServerConfig
from lightning_pipesync.methods.servers.messages import Accrued, Fetch, Gradient, Push, Request, UpdateSettings
from lightning_pipesync.methods.servers.router import MessageRouter
from lightning_pipesync.methods.servers.shards import SharedBucket
from lightning_pipesync.methods.step import UserSteps

T = TypeVar("T")
Hooks: TypeAlias = list[RemovableHandle]


class Learner:
    """Pushes the gradient of each step, and continues from the weights that the servers then send.

    With policies that cancel passes it ends its pass at the next layer once there are newer weights, and repeats it if
    it is in a closure.
    """

    #: Whether it updates its weights itself, so that they are not those that it has fetched.
    moves_weights: ClassVar[bool] = False
    #: Whether its weights are a replica that a flush keeps (EASGD).
    keeps_replica: ClassVar[bool] = False
    #: Whether the user's optimizer runs here, and not on the servers.
    owns_optimizer: ClassVar[bool] = False

    def __init__(
        self,
        router: MessageRouter,
        rank: int,
        buckets: Sequence[SharedBucket],
        optimizers: Sequence[Optimizer],
        user_steps: UserSteps,
        config: ParameterServerConfig,
    ) -> None:
        self.steps = self.num_cancelled = 0  # numbers of steps, and of cancelled passes
        self.versions = (0,) * router.num_servers  # of the fetched weights, by server
        self.ahead = 0.0  # the number of updates by which the fetched weights were predicted
        self.clipping: dict[int, dict[str, float]] = {}  # of the next mean gradient, by optimizer: see UpdateSettings
        self.outer: Optimizer | None = None  # runs on the servers in place of the user's; None: there is none
        self._router, self._rank, self._buckets, self._optimizers = router, rank, buckets, optimizers
        self._user_steps, self._config = user_steps, config
        self._cancels = self._may_cancel = self._accumulates = False
        self.after_fetch: Callable[[], None] = lambda: None  # called when the parameters have newer weights

    def step(self, index: int, update: Callable[[], T] | None) -> T | None:
        stepped, result = self._user_steps.update_by_method(index, update, evaluate=self._evaluate)
        if stepped:
            self.steps += 1
            identity = Gradient(self._rank, self.steps, self.version, index, self.ahead, of_shards=self._of_shards)
            self._push_and_fetch(identity)
        self._accumulates = False
        self.clipping.pop(index, None)
        mark_stepped(self._optimizers[index])
        return result

    @property
    def version(self) -> int:
        """That of the fetched weights; of several shards' versions, the newest."""
        return max(self.versions)

    @property
    def _of_shards(self) -> tuple[int, ...]:
        """What a gradient tells of the fetched weights if its version does not."""
        return self.versions if self._config.independent_shards else ()

    def retire(self) -> None:
        """Waits until all gradients are applied, and fetches the weights, which are the same on all ranks."""
        self._fetch(Request.RETIRE)

    def retire_to_reload(self, weights_loaded: bool) -> None:
        """Waits until all gradients are applied, and keeps its weights.

        With ``weights_loaded`` these were loaded on all ranks, and what it has accrued is dropped.
        """
        self._router.request(Request.RELOAD)
        self._router.await_weights("all ranks to load weights or an optimizer's state, as this one has")

    def begin_from_flushed(self) -> None:
        """Prepares a step from weights that all ranks have: flushed, without :meth:`restore_replica`, or loaded."""

    def keep_replica(self) -> None:
        """Keeps a copy of the replica before a flush makes the parameters the servers' weights."""

    def restore_replica(self) -> None:
        """Undoes :meth:`keep_replica`; also continues with the replica of a saved state."""

    def hook(self, module: nn.Module, parameters: Sequence[NamedParameter], is_synced: Callable[[], bool]) -> Hooks:
        """Registers the hooks at which passes are cancelled, if the policy does that; returns their handles."""
        self._cancels, self._is_synced = True, is_synced
        check = ModuleHook(self.cancel_if_late)
        hooks = [child.register_forward_pre_hook(check) for child in modules_with_parameters(module)]
        return hooks + [hook_gradient(p.tensor, self._after_gradient) for p in parameters if p.group]

    def cancel_if_late(self, *_: object) -> None:
        """Cancels the current pass if its gradient would not be used, and it can be repeated."""
        if self._may_cancel and self._is_late:
            raise PassCancelled

    def drop_residuals(self) -> None:
        """Forgets what a codec has not sent."""
        for bucket in self._buckets:
            if bucket.residual is not None:
                bucket.residual.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Returns the counters and residuals, and the state of an optimizer that runs here."""
        residuals = [bucket.residual for bucket in self._buckets if bucket.residual is not None]
        state = {"versions": self.versions, "steps": self.steps, "residuals": residuals}
        return {**state, "optimizer": self._optimizers[0].state_dict()} if self.owns_optimizer else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        num_servers, saved = self._router.num_servers, tuple(state["versions"])
        self.versions = saved if len(saved) == num_servers else (max(saved),) * num_servers  # there were others
        self.steps = state["steps"]
        for bucket, residual in zip(self._buckets, state["residuals"], strict=False):
            if bucket.residual is not None:
                bucket.residual.copy_(residual)
        if self.owns_optimizer:
            load_optimizer_state(self._optimizers[0], state["optimizer"])

    @property
    def _is_late(self) -> bool:
        """Whether a gradient at this rank's weights would not be used."""
        return self._cancels and self._router.newest > self.version

    def _evaluate(self, closure: Callable[[], T]) -> T:
        while True:
            self._may_cancel = not self._accumulates
            try:
                return closure()
            except PassCancelled:
                self.num_cancelled += 1
                for bucket in self._buckets:
                    bucket.clear_gradients()
                self._fetch(Request.FETCH)
            finally:
                self._may_cancel = False

    def _after_gradient(self, _: Tensor) -> None:
        self._accumulates |= not self._is_synced()  # the gradients of earlier passes cannot be repeated
        self.cancel_if_late()

    def _push_and_fetch(self, gradient: Gradient) -> None:
        if self._is_late:
            self.num_cancelled += 1
            self._fetch(Request.FETCH)
        else:
            self._push(gradient, [bucket.pack() for bucket in self._buckets_of(gradient.optimizer)])
            self._await_weights()

    def _fetch(self, request: Request) -> None:
        self._router.request(request)
        self._await_weights()

    def _await_weights(self) -> None:
        """Waits for the requested weights, and copies them into the parameters."""
        if self._receive() or self.moves_weights:
            for bucket in self._buckets:
                bucket.unpack()
            self.after_fetch()

    def _receive(self) -> bool:
        """Waits for the requested weights, and copies them into the buckets; returns whether they are new."""
        with profiled("pull"):
            messages = self._router.await_weights()
            self.versions = tuple(messages[server].version for server in range(self._router.num_servers))
            for server, message in messages.items():
                self.ahead = message.ahead
                for bucket, shard in zip(self._buckets, message.values or (), strict=False):
                    bucket.receive(server, shard)
        self._router.newest = max(self._router.newest, self.version)
        return any(message.values is not None for message in messages.values())

    def _push(self, gradient: Gradient, present: list[list[bool]]) -> None:
        """Pushes the packed buckets; ``present``: which parameters of each have a gradient."""
        index = gradient.optimizer
        settings = self._settings_of(index)
        for server in range(self._router.num_servers):
            with profiled("push to server", server):
                wires = [bucket.encoded(server) for bucket in self._buckets_of(index)]
                is_used_there = server in self._router.coordinators
                of_server = replace(gradient, version=gradient.of_shards[server]) if gradient.of_shards else gradient
                self._router.send(server, Push(of_server, settings if is_used_there else None, wires, present))

    def _settings_of(self, index: int) -> UpdateSettings:
        """Returns how the servers are to apply what this learner pushes."""
        return UpdateSettings(current(self._optimizers[index]), **self.clipping.get(index, {}))

    def _buckets_of(self, index: int) -> list[SharedBucket]:
        return [bucket for bucket in self._buckets if bucket.group[0] == index]


class PassCancelled(BaseException):
    """Ends a pass whose gradient would not be used. A BaseException, so that users' handlers of errors let it pass."""


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

    def state_dict(self) -> dict[str, Any]:
        kept = [flat.to("cpu", copy=True) for flat in self._kept]
        return {**super().state_dict(), "replica": kept, "first_step": self._first_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        pairs = zip(self._buckets, state["replica"], strict=True)
        self._kept = [kept.to(bucket.packed.device, copy=True) for bucket, kept in pairs]
        self._first_step = state["first_step"]


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

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._first_step = self.steps + 1

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
LEARNERS: dict[str, type[Learner]] = {"downpour": DownpourLearner, "easgd": EASGDLearner, "diloco": DiLoCoLearner}
