"""A server: applies gradients to its shard of the weights, and sends it to learners."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.core.comm.handle import Worker
from lightning_pipesync.core.torch_private import foreach_norm
from lightning_pipesync.methods.servers.backups import Backups
from lightning_pipesync.methods.servers.config import ParameterServerConfig
from lightning_pipesync.methods.servers.differences import Differences
from lightning_pipesync.methods.servers.messages import Sums, UpdateSettings, WeightsMessage
from lightning_pipesync.methods.servers.policies import Decision, Gradient, Update, weights_and_factor
from lightning_pipesync.methods.servers.shards import ServedShard

DOUBLE = torch.float64

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
        config: the settings.
        force: alpha, if replicas pull at the weights instead (EASGD); None: they do not.
        send_weights: called with a learner, what weights it gets, and the values of all shards, None if it has them.
        send_sums: called with what sums are for, and this server's part of them, which all servers are to get.
        keep: called when all are to get the same weights, before they do.
        fail: called with an error, after which the server does nothing more.
    """

    def __init__(
        self,
        shards: Sequence[ServedShard],
        num_servers: int,
        config: ParameterServerConfig,
        force: float | None,
        send_weights: Callable[[int, WeightsMessage, list[Tensor] | None], object],
        send_sums: Callable[[Sums, Tensor], object],
        keep: Callable[[], object],
        fail: Callable[[BaseException], object],
    ) -> None:
        self.version = 0
        self._shards, self._num_servers = list(shards), num_servers
        self._send_weights, self._send_sums, self._keep, self._fail = send_weights, send_sums, keep, fail
        self._pushed: dict[Key, Pushed] = {}
        self._unused: set[Key] = set()  # gradients that were dropped before they arrived
        self._sums: dict[Sums, dict[int, Tensor]] = {}  # parts of sums, by what these are for, and server
        self._sent: dict[int, WeightsMessage] = {}  # what each learner has
        self._force = force
        self._pulls: dict[int, list[Tensor]] = {}  # by learner, what its replica is pulled by
        self._compensates = config.delay_compensation == "dc_asgd"
        self._distance_bound = config.distance_bound if config.staleness_lr == "distance" else None
        self._fetch_codec = get_codec(config.fetch_compression)
        self._backups, self._differences = self._new_backups(), self._new_differences()
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

    def take_sums(self, server: int, sums: Sums, part: Tensor) -> None:
        """Takes a server's part of sums."""
        with self._arrived:
            self._sums.setdefault(sums, {})[server] = part
            self._arrived.notify_all()

    def follow(self, decision: Decision, settings: UpdateSettings | None) -> None:
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
            self._backups, self._differences = self._new_backups(), self._new_differences()

        self._worker.submit(reload)

    def close(self, timeout_s: float) -> None:
        """Ends the thread, after the queued decisions or after ``timeout_s`` seconds."""
        self._worker.close(timeout_s)
        with self._arrived:
            self._failed = True
            self._arrived.notify_all()

    def _follow(self, decision: Decision, settings: UpdateSettings | None) -> None:
        if decision.dropped is not None:
            self._drop(decision.dropped)
        if decision.update is not None:
            assert settings is not None
            self._update(decision.update, settings)
        if decision.whole:
            self._keep()
        for rank in decision.released:
            if rank in self._pulls:
                self._sent.pop(rank, None)
                self._send_weights(rank, WeightsMessage(self.version, 0.0), self._pulls.pop(rank))
                continue
            values, had = None, self._sent.get(rank)
            # Weights that were predicted from the same version serve as well as if they were predicted anew.
            is_current = had is not None and had.version == self.version and bool(had.ahead) == bool(decision.ahead)
            if had is None or not is_current or (decision.whole and had.are_differences):
                values = self._values_for(rank, decision)
            self._send_weights(rank, self._sent[rank], values)

    def _values_for(self, rank: int, decision: Decision) -> list[Tensor]:
        """Returns what is sent to a learner that does not have the weights, and notes that it has them."""
        values = [shard.ahead(decision.ahead / self._num_optimizers) for shard in self._shards]
        encodes = self._differences is not None and not decision.whole
        self._sent[rank] = weights = WeightsMessage(self.version, decision.ahead, encodes)
        sent, has = values, values
        if self._differences is not None and encodes:
            sent = self._differences.encode(rank, values)
            has = self._differences.of(rank)
        elif self._differences is not None:
            self._differences.sent_whole(rank, values)
        if self._backups is not None:
            self._backups.keep(rank, weights, has)
        return sent

    def _drop(self, gradient: Gradient) -> None:
        key = (gradient.rank, gradient.step)
        with self._arrived:
            if self._pushed.pop(key, None) is None:
                self._unused.add(key)

    def _update(self, update: Update, settings: UpdateSettings) -> None:
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
        computed_at = None if self._backups is None else [self._backups.at(gradient) for gradient in update.gradients]
        weights, lr_factor = update.weights, update.lr_factor
        if self._distance_bound is not None and computed_at is not None:
            weights, lr_factor = self._by_distance(update, computed_at, self._distance_bound)
        means = self._average(update, weights, pushed, computed_at if self._compensates else None)
        self.version = update.version
        self._clip(means, settings)
        for i, shard in enumerate(shards):
            hyperparameters: Mapping[str, Any] = settings.hyperparameters[shard.bucket.group[1]]
            if lr_factor != 1:
                hyperparameters = {**hyperparameters, "lr": hyperparameters["lr"] * lr_factor}
            present = [any(of_parameter) for of_parameter in zip(*(one.present[i] for one in pushed), strict=True)]
            shard.step(present, hyperparameters)

    def _by_distance(
        self, update: Update, computed_at: Sequence[Sequence[Tensor]], bound: float
    ) -> tuple[tuple[float, ...], float]:
        """Returns the weight of each gradient, and a factor on the rate, by how far the weights have moved since.

        The distance is that of all parameters of the optimizer, on all servers (Dutta et al., AISTATS 2018, Eq. 13).
        """
        own = [index for index, shard in enumerate(self._shards) if shard.bucket.group[0] == update.optimizer]
        parts = [
            sum((self._shards[index].squared_distance(values[index]) for index in own), torch.zeros((), dtype=DOUBLE))
            for values in computed_at
        ]
        total = self._summed(Sums(update.version, "distances"), torch.stack(parts))
        if total is None:  # the training has ended
            return update.weights, update.lr_factor
        factors = [min(1.0, bound / distance) if distance else 1.0 for distance in total.tolist()]
        return weights_and_factor(factors)

    def _average(
        self,
        update: Update,
        weights: Sequence[float],
        pushed: Sequence[Pushed],
        computed_at: Sequence[Sequence[Tensor]] | None,
    ) -> list[Tensor]:
        """Returns the mean gradient of each shard that an update's optimizer has."""
        means: list[Tensor] = []
        for index, shard in enumerate(self._shards):
            if shard.bucket.group[0] == update.optimizer:
                wires = [one.wires[len(means)] for one in pushed]
                at = None if computed_at is None else [values[index] for values in computed_at]
                means.append(shard.average(wires, weights, at))
        return means

    def _new_backups(self) -> Backups | None:
        needed = self._compensates or self._distance_bound is not None
        return Backups([shard.values for shard in self._shards]) if needed else None

    def _new_differences(self) -> Differences | None:
        if self._fetch_codec.lossless:
            return None
        return Differences(self._fetch_codec, [shard.values for shard in self._shards])

    @torch.no_grad()
    def _clip(self, means: list[Tensor], settings: UpdateSettings) -> None:
        """Clips the mean gradient, whose norm is that of all servers' shards."""
        if settings.max_value is not None:
            for mean in means:
                mean.clamp_(-settings.max_value, settings.max_value)
        if settings.max_norm is None:
            return
        squared = self._summed(Sums(self.version, "norm"), torch.stack(foreach_norm(means)).square_().sum())
        if squared is None:
            return
        factor = (settings.max_norm / (squared.sqrt() + 1e-6)).clamp(max=1.0)
        for mean in means:
            mean.mul_(factor)

    def _summed(self, sums: Sums, part: Tensor) -> Tensor | None:
        """Returns the sums of all servers' parts, the same bits on all; None if the training has ended."""
        self._send_sums(sums, part)
        if not self._await(lambda: len(self._sums.get(sums, ())) == self._num_servers):
            return None
        parts = self._sums.pop(sums)
        return torch.stack([parts[server] for server in range(self._num_servers)]).sum(dim=0)

    def _await(self, arrived: Callable[[], bool]) -> bool:
        """Waits for what others send; returns whether it has arrived, and the server goes on."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._failed or arrived())
        return not self._failed
