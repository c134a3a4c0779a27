"""A server: applies gradients to its shards of the weights, and sends them to learners."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_pipesync.core.comm.handle import Worker
from lightning_pipesync.core.comm.mail import Letter
from lightning_pipesync.core.profiling import profiled
from lightning_pipesync.core.torch_private import foreach_norm
from lightning_pipesync.methods.servers.config import ParameterServerConfig
from lightning_pipesync.methods.servers.messages import (
    Decision,
    Gradient,
    PartialSums,
    Push,
    Update,
    UpdateSettings,
    WeightsMessage,
)
from lightning_pipesync.methods.servers.policies import weights_and_factor
from lightning_pipesync.methods.servers.shards import ServedShard

#: A learner and the number of its step.
Key = tuple[int, int]


class Server:
    """Follows the coordinator's decisions, one after the other, on a thread and, on CUDA, on a stream of its own.

    It calls ``before_flush`` before all ranks get the same weights, and does nothing more after a call of ``fail``. For
    DC-ASGD (Algorithm 2, w_bak) and the distance rule it keeps the weights that gradients are computed at.
    """

    def __init__(
        self,
        shards: Sequence[ServedShard],
        num_servers: int,
        config: ParameterServerConfig,
        send: Callable[[int, Any], object],
        fail: Callable[[BaseException], object],
        before_flush: Callable[[], object],
    ) -> None:
        self.version = 0
        self._shards, self._num_servers = list(shards), num_servers
        self._send, self._fail, self._before_flush = send, fail, before_flush
        self._pushed: dict[Key, Push] = {}
        self._unused: set[Key] = set()  # gradients that were dropped before they arrived
        self._sums: dict[tuple[int, str], dict[int, Tensor]] = {}  # by version and kind, the parts by server
        self._compensates = config.delay_compensation == "dc_asgd"
        self._distance_bound = config.distance_bound if config.staleness_lr == "distance" else None
        self._keeps_fetched = self._compensates or self._distance_bound is not None
        self._num_optimizers = len({shard.bucket.group[0] for shard in shards})
        self._newest: Letter | None = None  # with the newest weights, for all learners that need them
        self._arrived = threading.Condition()
        self._ended = False
        self._device = self._shards[0].values.device
        self._worker = Worker("pipesync-server", device=self._device)
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        if self._stream is not None:  # the shards were made on the caller's
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._submit(self._forget_fetched)

    def push(self, push: Push) -> None:
        key = (push.gradient.rank, push.gradient.step)
        with self._arrived:
            if key in self._unused:
                self._unused.remove(key)
            else:
                self._pushed[key] = push
            self._arrived.notify_all()

    def add_sums(self, server: int, sums: PartialSums) -> None:
        with self._arrived:
            self._sums.setdefault((sums.version, sums.kind), {})[server] = sums.part
            self._arrived.notify_all()

    def follow(self, decision: Decision) -> None:
        """Queues a decision."""
        self._submit(lambda: self._follow(decision))

    def reload(self, read: Callable[[], object]) -> None:
        """Queues ``read``, which changes the weights of the shards to what the caller has loaded."""
        loaded = None if self._stream is None else torch.cuda.current_stream(self._device).record_event()

        def reload() -> None:
            if self._stream is not None and loaded is not None:
                self._stream.wait_event(loaded)
            read()
            self._forget_fetched()

        self._submit(reload)

    def close(self, timeout_s: float) -> None:
        """Ends the thread, after the queued decisions or after ``timeout_s`` seconds."""
        self._worker.close(timeout_s)
        if self._stream is not None:  # the shards may be freed next
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        with self._arrived:
            self._ended = True
            self._arrived.notify_all()

    def _submit(self, job: Callable[[], object]) -> None:
        def run() -> None:
            if self._ended:
                return
            try:
                with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                    job()
            except BaseException as error:
                if not self._ended:
                    self._fail(error)
                self._ended = True

        self._worker.submit(run)

    def _follow(self, decision: Decision) -> None:
        if decision.dropped is not None:
            self._drop(decision.dropped)
        if decision.update is not None:
            assert decision.settings is not None
            keys = [(gradient.rank, gradient.step) for gradient in decision.update.gradients]
            self._await(lambda: all(key in self._pushed for key in keys))
            pushed = [self._pushed.pop(key) for key in keys]
            for wire in (wire for push in pushed for wire in push.wires if wire.is_cuda):
                wire.record_stream(torch.cuda.current_stream(self._device))  # this rank's learner has allocated it
            with profiled("update of server"):
                self._update(decision.update, decision.settings, pushed)
            self.version = decision.update.version
        if decision.whole:
            self._before_flush()
        for rank in decision.released:
            self._send(rank, self._weights_for(rank, decision))

    def _weights_for(self, rank: int, decision: Decision) -> WeightsMessage | Letter:
        """Returns the message to a released learner; nothing is sent twice."""
        in_steps = not decision.whole
        has = self._fetched_last.get(rank)
        # Weights that were predicted from the same version are not predicted again.
        if has is not None and (has.version, bool(has.ahead)) == (self.version, bool(decision.ahead)):
            return Letter(has, in_steps=in_steps)
        newest = self._newest
        if newest is None or (newest.message.version, newest.message.ahead) != (self.version, decision.ahead):
            values = [shard.ahead(decision.ahead / self._num_optimizers) for shard in self._shards]
            newest = self._newest = Letter(WeightsMessage(self.version, decision.ahead, values), in_steps=in_steps)
        elif newest.in_steps != in_steps:
            newest = self._newest = replace(newest, in_steps=in_steps)
        if self._keeps_fetched:
            self._fetched.setdefault(rank, {})[self.version, decision.ahead] = newest.message.values
        self._fetched_last[rank] = replace(newest.message, values=None)
        return newest

    def _drop(self, gradient: Gradient) -> None:
        key = (gradient.rank, gradient.step)
        with self._arrived:
            if self._pushed.pop(key, None) is None:
                self._unused.add(key)

    def _update(self, update: Update, settings: UpdateSettings, pushed: Sequence[Push]) -> None:
        numbers = [i for i, shard in enumerate(self._shards) if shard.bucket.group[0] == update.optimizer]
        shards = [self._shards[i] for i in numbers]
        weights, lr_factor = update.weights, update.lr_factor
        computed_at: list[list[Tensor]] = []  # for each shard, what each gradient was computed at
        if self._keeps_fetched:
            fetched = [self._weights_of(gradient) for gradient in update.gradients]
            computed_at = [[values[i] for values in fetched] for i in numbers]
        if self._distance_bound is not None:
            weights, lr_factor = self._by_distance(update, shards, computed_at, self._distance_bound)
        means = []
        for i, shard in enumerate(shards):
            wires = [push.wires[i] for push in pushed]
            means.append(shard.average(wires, weights, computed_at[i] if self._compensates else None))
        self._clip(update.version, means, settings)
        for i, shard in enumerate(shards):
            hyperparameters: Mapping[str, Any] = settings.hyperparameters[shard.bucket.group[1]]
            if lr_factor != 1:
                hyperparameters = {**hyperparameters, "lr": hyperparameters["lr"] * lr_factor}
            present = [any(of_parameter) for of_parameter in zip(*(push.present[i] for push in pushed), strict=True)]
            shard.step(present, hyperparameters)

    def _weights_of(self, gradient: Gradient) -> list[Tensor]:
        """Returns the weights at which a gradient was computed; drops older ones of its learner."""
        fetched = self._fetched.setdefault(gradient.rank, {})
        for older in [key for key in fetched if key[0] < gradient.version]:
            del fetched[older]
        return fetched.get((gradient.version, gradient.ahead), self._first)

    def _by_distance(
        self, update: Update, shards: Sequence[ServedShard], computed_at: Sequence[Sequence[Tensor]], bound: float
    ) -> tuple[tuple[float, ...], float]:
        """Returns :func:`weights_and_factor` by how far the weights have moved since each gradient was computed.

        The distance is that of all parameters of the optimizer, on all servers (Dutta et al., AISTATS 2018, Eq. 13).
        """
        zero = torch.zeros((), dtype=torch.float64)
        parts = [
            sum((shard.squared_distance(at) for shard, at in zip(shards, of_shards, strict=True)), zero)
            for of_shards in zip(*computed_at, strict=True)
        ]
        total = self._summed(PartialSums(update.version, "distances", torch.stack(parts).cpu()))
        return weights_and_factor([min(1.0, bound / distance) if distance else 1.0 for distance in total.tolist()])

    @torch.no_grad()
    def _clip(self, version: int, means: list[Tensor], settings: UpdateSettings) -> None:
        """Clips the mean gradient, whose norm is that of all servers' shards."""
        if settings.max_value is not None:
            for mean in means:
                mean.clamp_(-settings.max_value, settings.max_value)
        if settings.max_norm is None:
            return
        squared = self._summed(PartialSums(version, "norm", torch.stack(foreach_norm(means)).square_().sum().cpu()))
        factor = (settings.max_norm / (squared.sqrt() + 1e-6)).clamp(max=1.0)
        for mean in means:
            mean.mul_(factor)

    def _summed(self, sums: PartialSums) -> Tensor:
        """Returns the sums over all servers, with the same bits on all, on the host."""
        for server in range(self._num_servers):
            self._send(server, sums)
        key = (sums.version, sums.kind)
        self._await(lambda: len(self._sums.get(key, ())) == self._num_servers)
        parts = self._sums.pop(key)
        return torch.stack([parts[server] for server in range(self._num_servers)]).sum(dim=0)

    def _await(self, arrived: Callable[[], bool]) -> None:
        with self._arrived:
            self._arrived.wait_for(lambda: self._ended or arrived())
        if self._ended:
            raise RuntimeError("The server is closed.")

    def _forget_fetched(self) -> None:
        """Begins with the weights that all learners have now."""
        self._first = [shard.values.clone() for shard in self._shards] if self._keeps_fetched else []
        self._newest = None
        self._fetched_last: dict[int, WeightsMessage] = {}  # by learner, without values
        self._fetched: dict[int, dict[tuple[int, float], list[Tensor]]] = {}  # by learner, version, and updates ahead


class CenterServer(Server):
    """A server of EASGD: it has the center, and the center and the replicas attract each other."""

    def __init__(self, force: float, *args: Any) -> None:
        super().__init__(*args)
        self._force = force
        self._pulls: dict[int, list[Tensor]] = {}  # by learner, what it subtracts from its replica

    def _update(self, update: Update, settings: UpdateSettings, pushed: Sequence[Push]) -> None:
        (pull,), (gradient,) = pushed, update.gradients
        pairs = zip(self._shards, pull.wires, strict=True)
        self._pulls[gradient.rank] = [shard.pull(wire, self._force) for shard, wire in pairs]

    def _weights_for(self, rank: int, decision: Decision) -> WeightsMessage | Letter:
        if rank not in self._pulls:
            return super()._weights_for(rank, decision)
        self._fetched_last.pop(rank, None)
        return WeightsMessage(self.version, 0.0, self._pulls.pop(rank))
