"""Trainings with parameter servers in which each rank goes at its own pace."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipesync.data.train_loader import TrainLoader
from lightning_pipesync.data.work_queue import WorkQueueBatches
from lightning_pipesync.lab.bench.tasks import Task
from lightning_pipesync.lab.bench.trainings import Training, WithMethod
from lightning_pipesync.methods.servers import ParameterServer, ParameterServerConfig


@dataclass(frozen=True)
class ServedConfig(ParameterServerConfig):
    """Settings of a training with parameter servers."""

    lr_scale: float | None = None
    """Factor on the task's learning rate. None: the number of gradients of an update over that of the ranks, so that a
    sample counts as much as with an update by the mean of all ranks' gradients."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr_scale is not None and not self.lr_scale > 0:
            raise ValueError(f"lr_scale must be a positive number, got {self.lr_scale!r}.")


class WithServers(WithMethod):
    """A training with parameter servers, with as many steps on each rank. They may cancel passes."""

    method: ParameterServer

    def __init__(self, task: Task, config: ServedConfig) -> None:
        super().__init__(task, config, ParameterServer)
        world_size = dist.get_world_size()
        scale = config.lr_scale or config.policy_for(world_size).gradients / world_size
        for group in self.optimizer.param_groups:
            group["lr"] *= scale

    def step(self, batch: Any) -> None:
        def closure() -> float:
            self.module.zero_grad()
            loss = self.passes.run(lambda: self.task.loss(self.module, batch), self.method.cancel_if_late)
            if self.task.max_norm is not None:
                self.method.clip(self.task.max_norm)
            return loss

        self.method.step(lambda: self.optimizer.step(closure))


class AtOwnPace(WithServers):
    """A training with parameter servers in which an epoch's batches are handed out to whoever asks next."""

    def __init__(self, task: Task, config: ServedConfig) -> None:
        super().__init__(task, replace(config, partition="work_queue", keep_log=True))

    def loader(self, seed: int) -> TrainLoader:
        loader = DataLoader(self.task.train_set, self.task.batch_size, shuffle=True)
        return self.method.prepare_train_loader(loader, seed)

    @property
    def staleness(self) -> list[int]:
        """The number of gradients of each staleness, from 0 on; on rank 0."""
        staleness = [one for update in self.method.log for one in update.staleness]
        return [staleness.count(one) for one in range(max(staleness, default=-1) + 1)]

    def train(self, seed: int, num_steps: int, evaluations: int) -> Iterator[tuple[dict[str, float], nn.Module]]:
        """Trains on as many samples as ``num_steps`` steps of all ranks have; a collective call.

        Nobody waits for a measurement: whoever is handed the first batch of the next part of the training, and so has
        just received weights, copies them. The learning rate follows the batches that were handed out.

        Args:
            seed: of the order of the data.
            num_steps: the number of steps.
            evaluations: the number of parts of the same size.

        Yields:
            After the training, for the end of each part: ``steps``, the seconds since the beginning, the MiB that rank
            0 has sent, evenly divided; and a module with the weights, the same on all ranks, until the next one.
        """
        loader = self.loader(seed)
        order = cast(WorkQueueBatches, loader.batch_sampler)
        num_batches = round(num_steps / self.steps_per_epoch * order.num_batches)
        scheduler = self.task.scheduler(self.optimizer, num_steps)
        ends = {1 + i * num_batches // evaluations: i for i in range(1, evaluations)}
        copies: dict[int, tuple[float, dict[str, Tensor]]] = {}
        mib_before = self.mib_sent
        dist.barrier()
        start = time.perf_counter()
        for batch in chain.from_iterable(repeat(loader)):
            if order.num_taken > num_batches:
                break
            if order.num_taken in ends:
                copies[ends[order.num_taken]] = time.perf_counter() - start, _weights_of(self.module)
            while scheduler.last_epoch < (order.num_taken - 1) * num_steps // num_batches:
                scheduler.step()
            self.step(batch)
        with self.consolidated():
            if dist.get_rank() == 0:
                copies[evaluations] = time.perf_counter() - start, _weights_of(self.module)
        mib = self.mib_sent - mib_before
        for i, (seconds, module) in enumerate(self._on_all_ranks(copies), start=1):
            share = i / evaluations
            yield {"steps": share * num_steps, "seconds": seconds, "mib": share * mib}, module

    def _on_all_ranks(self, copies: dict[int, tuple[float, dict[str, Tensor]]]) -> Iterator[tuple[float, nn.Module]]:
        """Yields the copies of all ranks, in their order, on all ranks; a collective call."""
        seconds_of = {i: seconds for i, (seconds, _) in copies.items()}
        all_seconds: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(all_seconds, seconds_of)
        holders = {i: rank for rank, held in enumerate(all_seconds) for i in held}
        module = self.task.build_module()
        for i in sorted(holders):
            if i in copies:
                module.load_state_dict(copies[i][1])
            for tensor in module.state_dict().values():
                dist.broadcast(tensor, holders[i])
            yield all_seconds[holders[i]][i], module


def with_servers(task: Task, config: ServedConfig) -> Training:
    """Returns a training with parameter servers.

    It is at the ranks' own pace unless the policy makes all wait for all, or each rank has data of its own.
    """
    together = config.policy == "sync" or task.labels_per_worker is not None
    return WithServers(task, config) if together else AtOwnPace(task, config)


def _weights_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}
