"""A server: applies gradients to its shard of the weights, and sends it to learners."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_pipesync.core.handle import Worker
from lightning_pipesync.core.torch_private import foreach_norm
from lightning_pipesync.methods.parameter_server.algorithm import Decision, Gradient, Update
from lightning_pipesync.methods.parameter_server.delay_compensation import Backups
from lightning_pipesync.methods.parameter_server.messages import StepSettings, Weights
from lightning_pipesync.methods.parameter_server.shards import ServedShard

#: A learner and the number of its step.
Key = tuple[int, int]


@dataclass(frozen=True)
class Pushed:
    """What a learner pushes to a server.

    Attributes:
        wires: its gradient of each of the server's shards that the optimizer has, encoded.
        present: for each of them which parameters have a gradient.
    """

    wires: list[Tensor]
    present: list[list[bool]]


class Server:
    """Follows the sequencer's decisions, one after the other, on its own thread.

    Attributes:
        version: of the weights.

    Args:
        shards: the server's shards of all buckets.
        num_servers: the number of servers.
        compensates: whether gradients are compensated for the weights at which they were computed.
        force: alpha, if replicas pull at the weights instead (EASGD); None: they do not.
        send_weights: called with a learner, what weights it gets, and the values of all shards, None if it has them.
        send_norm: called with a version and this server's part of the squared norm, which all servers are to get.
        fail: called with an error, after which the server does nothing more.
    """

    def __init__(
        self,
        shards: Sequence[ServedShard],
        num_servers: int,
        compensates: bool,
        force: float | None,
        send_weights: Callable[[int, Weights, list[Tensor] | None], object],
        send_norm: Callable[[int, Tensor], object],
        fail: Callable[[BaseException], object],
    ) -> None:
        self.version = 0
        self._shards, self._num_servers = list(shards), num_servers
        self._send_weights, self._send_norm, self._fail = send_weights, send_norm, fail
        self._pushed: dict[Key, Pushed] = {}
        self._unused: set[Key] = set()  # gradients that were dropped before they arrived
        self._norms: dict[int, dict[int, Tensor]] = {}  # parts of the squared norm, by version and server
        self._sent: dict[int, Weights] = {}  # what each learner has
        self._force = force
        self._pulls: dict[int, list[Tensor]] = {}  # by learner, what its replica is pulled by
        self._compensates = compensates
        self._backups = self._new_backups()
        self._num_optimizers = len({shard.bucket.group[0] for shard in shards})
        self._arrived = threading.Condition()
        self._failed = False
        self._worker = Worker("pipesync-server")

    def push(self, rank: int, step: int, pushed: Pushed) -> None:
        """Takes a learner's gradient."""
        with self._arrived:
            if (rank, step) in self._unused:
                self._unused.remove((rank, step))
            else:
                self._pushed[rank, step] = pushed
            self._arrived.notify_all()

    def take_norm(self, server: int, version: int, part: Tensor) -> None:
        """Takes a server's part of the squared norm of the gradient that makes a version."""
        with self._arrived:
            self._norms.setdefault(version, {})[server] = part
            self._arrived.notify_all()

    def follow(self, decision: Decision, settings: StepSettings | None) -> None:
        """Queues a decision of the sequencer, and the settings of its update."""

        def follow() -> None:
            if self._failed:
                return
            try:
                self._follow(decision, settings)
            except BaseException as error:
                self._failed = True
                self._fail(error)

        self._worker.submit(follow)

    def reload(self, read: Callable[[], object]) -> None:
        """Queues a function that gives the shards other weights."""

        def reload() -> None:
            self._sent.clear()
            read()
            self._backups = self._new_backups()

        self._worker.submit(reload)

    def close(self, timeout_s: float) -> None:
        """Ends the thread, after the queued decisions or after ``timeout_s`` seconds."""
        self._worker.close(timeout_s)
        with self._arrived:
            self._failed = True
            self._arrived.notify_all()

    def _follow(self, decision: Decision, settings: StepSettings | None) -> None:
        if decision.dropped is not None:
            self._drop(decision.dropped)
        if decision.update is not None:
            assert settings is not None
            self._update(decision.update, settings)
        for rank in decision.released:
            if rank in self._pulls:
                self._sent.pop(rank, None)
                self._send_weights(rank, Weights(self.version, 0.0), self._pulls.pop(rank))
                continue
            values, had = None, self._sent.get(rank)
            # Weights that were predicted from the same version serve as well as if they were predicted anew.
            if had is None or had.version != self.version or bool(had.ahead) != bool(decision.ahead):
                self._sent[rank] = Weights(self.version, decision.ahead)
                values = [shard.ahead(decision.ahead / self._num_optimizers) for shard in self._shards]
                if self._backups is not None:
                    self._backups.keep(rank, self.version, values)
            self._send_weights(rank, self._sent[rank], values)

    def _drop(self, gradient: Gradient) -> None:
        key = (gradient.rank, gradient.step)
        with self._arrived:
            if self._pushed.pop(key, None) is None:
                self._unused.add(key)

    def _update(self, update: Update, settings: StepSettings) -> None:
        keys = [(gradient.rank, gradient.step) for gradient in update.gradients]
        if not self._await(lambda: all(key in self._pushed for key in keys)):
            return
        pushed = [self._pushed.pop(key) for key in keys]
        if self._force is not None:
            (rank, _), (replica,) = keys[0], pushed
            pairs = zip(self._shards, replica.wires, strict=True)
            self._pulls[rank] = [shard.pull(wire, self._force) for shard, wire in pairs]
            self.version = update.version
            return
        shards = [shard for shard in self._shards if shard.bucket.group[0] == update.optimizer]
        means = self._average(update, pushed)
        self.version = update.version
        self._clip(means, settings)
        for i, shard in enumerate(shards):
            hyperparameters: Mapping[str, Any] = settings.hyperparameters[shard.bucket.group[1]]
            if update.lr_factor != 1:
                hyperparameters = {**hyperparameters, "lr": hyperparameters["lr"] * update.lr_factor}
            present = [any(of_parameter) for of_parameter in zip(*(one.present[i] for one in pushed), strict=True)]
            shard.step(present, hyperparameters)

    def _average(self, update: Update, pushed: Sequence[Pushed]) -> list[Tensor]:
        """Returns the mean gradient of each shard that an update's optimizer has."""
        computed_at = None
        if self._backups is not None:
            computed_at = [self._backups.at(gradient) for gradient in update.gradients]
        means: list[Tensor] = []
        for index, shard in enumerate(self._shards):
            if shard.bucket.group[0] == update.optimizer:
                wires = [one.wires[len(means)] for one in pushed]
                at = None if computed_at is None else [values[index] for values in computed_at]
                means.append(shard.average(wires, update.weights, at))
        return means

    def _new_backups(self) -> Backups | None:
        return Backups([shard.values for shard in self._shards]) if self._compensates else None

    @torch.no_grad()
    def _clip(self, means: list[Tensor], settings: StepSettings) -> None:
        """Clips the mean gradient, whose norm is that of all servers' shards."""
        if settings.max_value is not None:
            for mean in means:
                mean.clamp_(-settings.max_value, settings.max_value)
        if settings.max_norm is None:
            return
        self._send_norm(self.version, torch.stack(foreach_norm(means)).square_().sum())
        if not self._await(lambda: len(self._norms.get(self.version, ())) == self._num_servers):
            return
        parts = self._norms.pop(self.version)
        norm = torch.stack([parts[server] for server in range(self._num_servers)]).sum().sqrt()
        factor = (settings.max_norm / (norm + 1e-6)).clamp(max=1.0)
        for mean in means:
            mean.mul_(factor)

    def _await(self, arrived: Callable[[], bool]) -> bool:
        """Waits for what others send; returns whether it has arrived, and the server goes on."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._failed or arrived())
        return not self._failed
