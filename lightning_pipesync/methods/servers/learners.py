"""Learners that push each gradient, and continue from the weights that they then fetch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeAlias, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_pipesync.core.parameters import (
    NamedParameter,
    hook_gradient,
    modules_with_parameters,
)
from lightning_pipesync.core.profiling import profiled
from lightning_pipesync.core.torch_private import mark_stepped
from lightning_pipesync.methods.hyperparameters import current
from lightning_pipesync.methods.module_hook import ModuleHook
from lightning_pipesync.methods.servers.config import ParameterServerConfig
from lightning_pipesync.methods.servers.messages import Gradient, Push, Request, UpdateSettings
from lightning_pipesync.methods.servers.router import MessageRouter
from lightning_pipesync.methods.servers.shards import SharedBucket
from lightning_pipesync.methods.step import UserSteps

T = TypeVar("T")
Hooks: TypeAlias = list[RemovableHandle]


class Learner:
    """Pushes the gradient of each step, and continues from the weights that the servers then send."""

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
        self.after_fetch: Callable[[], None] = lambda: None  # called when the parameters have newer weights

    def step(self, index: int, update: Callable[[], T] | None) -> T | None:
        stepped, result = self._user_steps.update_by_method(index, update, evaluate=self._evaluate)
        if stepped:
            self.steps += 1
            identity = Gradient(self._rank, self.steps, self.version, index, self.ahead, of_shards=self._of_shards)
            self._push_and_fetch(identity)
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
        """Prepares the first step after a flush without :meth:`restore_replica`."""

    def keep_replica(self) -> None:
        """Keeps a copy of the replica before the parameters become the servers' weights."""

    def restore_replica(self) -> None:
        """Undoes :meth:`keep_replica`."""

    def begin_from_loaded(self) -> None:
        """Continues from loaded weights, after :meth:`retire_to_reload` and :meth:`retire`."""

    def hook(self, module: nn.Module, parameters: Sequence[NamedParameter], is_synced: Callable[[], bool]) -> Hooks:
        """Registers the hooks at which a pass can be cancelled; returns their handles."""
        return []

    def cancel_if_late(self, *_: object) -> None:
        """Cancels the current pass if its gradient would not be used, and it can be repeated."""

    def drop_residuals(self) -> None:
        """Forgets what a codec has not sent."""
        for bucket in self._buckets:
            if bucket.residual is not None:
                bucket.residual.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Returns the counters and residuals, and the kept replica."""
        residuals = [bucket.residual for bucket in self._buckets if bucket.residual is not None]
        return {"versions": self.versions, "steps": self.steps, "residuals": residuals}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.versions, self.steps = versions_in(state, self._router.num_servers), state["steps"]
        for bucket, residual in zip(self._buckets, state["residuals"], strict=False):
            if bucket.residual is not None:
                bucket.residual.copy_(residual)

    def _evaluate(self, closure: Callable[[], T]) -> T:
        return closure()

    def _push_and_fetch(self, gradient: Gradient) -> None:
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
                    bucket.receive(server, shard, message.are_differences)
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


class CancellingLearner(Learner):
    """Cancels its pass at the next layer once there are newer weights, and repeats it if it is in a closure."""

    _may_cancel = _accumulates = False

    def hook(self, module: nn.Module, parameters: Sequence[NamedParameter], is_synced: Callable[[], bool]) -> Hooks:
        self._is_synced = is_synced
        check = ModuleHook(self.cancel_if_late)
        hooks = [child.register_forward_pre_hook(check) for child in modules_with_parameters(module)]
        return hooks + [hook_gradient(p.tensor, self._after_gradient) for p in parameters if p.group]

    def step(self, index: int, update: Callable[[], T] | None) -> T | None:
        result = super().step(index, update)
        self._accumulates = False
        return result

    def cancel_if_late(self, *_: object) -> None:
        if self._may_cancel and self._is_late:
            raise PassCancelled

    @property
    def _is_late(self) -> bool:
        """Whether a gradient at this rank's weights would not be used."""
        return self._router.newest > self.version

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

    def _push_and_fetch(self, gradient: Gradient) -> None:
        if self._is_late:
            self.num_cancelled += 1
            self._fetch(Request.FETCH)
        else:
            super()._push_and_fetch(gradient)

    def _after_gradient(self, _: Tensor) -> None:
        self._accumulates |= not self._is_synced()  # the gradients of earlier passes cannot be repeated
        self.cancel_if_late()


class PassCancelled(BaseException):
    """Ends a pass whose gradient would not be used. A BaseException, so that users' handlers of errors let it pass."""


def versions_in(state: Mapping[str, Any], num_servers: int) -> tuple[int, ...]:
    """Returns the versions of all servers' shards in a learner's saved state, which may have had other servers."""
    versions = state["versions"]
    return tuple(versions) if len(versions) == num_servers else (max(versions),) * num_servers
