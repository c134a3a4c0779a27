"""The training of a task on all ranks with a candidate, in step or at each rank's own pace."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.baselines.power_sgd import DDPConfig, DDPWithPowerSGD, PowerSGDConfig, least_mib
from benchmarks.tasks import Task
from lightning_pipesync.data import LabelSkewedSampler
from lightning_pipesync.data.loaders import with_seed_of_its_own
from lightning_pipesync.data.train_loader import TrainLoader
from lightning_pipesync.data.work_queue import WorkQueueBatches
from lightning_pipesync.lab.bench.candidates import (
    ALONE,
    MethodCandidate,
    RunPasses,
    Trainable,
    ddp,
    forward_and_backward,
    without_communication,
)
from lightning_pipesync.lab.bench.models import BenchModel
from lightning_pipesync.lab.bench.step import gradient_bytes
from lightning_pipesync.lab.predictions.entry import BenchCandidate
from lightning_pipesync.methods.servers import ParameterServer
from lightning_pipesync.methods.servers.config import ParameterServerConfig
from lightning_pipesync.training.registry import METHODS


@dataclass(frozen=True)
class AloneConfig:
    """Settings of training without communication: there are none."""


@dataclass(frozen=True)
class ServedConfig(ParameterServerConfig):
    """Settings of a training with parameter servers."""

    lr_scale: float | None = None
    """Factor on the task's learning rate. None: the number of gradients of an update over that of the ranks, so that a
    sample counts as much as with an update by the mean of all ranks' gradients; 1 with ``diloco``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr_scale is not None and not self.lr_scale > 0:
            raise ValueError(f"lr_scale must be a positive number, got {self.lr_scale!r}.")


class ServedCandidate(MethodCandidate):
    """Learners whose passes may be cancelled.

    They are at their own pace, on batches from a work queue, unless all wait for each other, or each rank has data of
    its own.
    """

    def __init__(self, model: BenchModel, config: ServedConfig, divided_data: bool) -> None:
        world_size = dist.get_world_size()
        policy = config.policy_for(world_size)
        self.own_pace = config.policy != "sync" and not divided_data
        if self.own_pace:
            config = replace(config, partition="work_queue", keep_log=True)
        super().__init__(model, ParameterServer, BenchCandidate(ParameterServer.name, config))
        for group in self.optimizer.param_groups:
            group["lr"] *= config.lr_scale or (1.0 if policy.by_steps else policy.gradients / world_size)

    def step(self, batch: Any = None) -> None:
        check = self.sync.cancel_if_late
        self.sync.step(lambda: self.optimizer.step(lambda: self.compute_gradient(batch, check)))


#: By name, what trains a task besides this package's methods: its settings, and what makes a candidate of a model.
ALTERNATIVES: dict[str, tuple[type[Any], Callable[[BenchModel, Any], Trainable]]] = {
    "alone": (AloneConfig, lambda model, _: without_communication(model)),
    "ddp": (DDPConfig, lambda model, config: ddp(model, config.bucket_mb)),
    "ddp_powersgd": (PowerSGDConfig, DDPWithPowerSGD),
}


#: What is compared if the user names no methods, each with its settings.
COMPARED = (
    *("ddp", "local_sgd:period=0.25epoch", "parameter_server:policy=ssp,staleness_bound=100,servers=1"),
    *("selsync:delta=0.1", "selsync:delta=0.3", "selsync:delta=1"),
)


def config_types() -> dict[str, type[Any]]:
    """Returns the dataclass of the settings of everything that trains a task, by name."""
    methods = {name: method.config_type for name, method in METHODS.items() if not method.makes_passes}
    alternatives = {name: config_type for name, (config_type, _) in ALTERNATIVES.items()}
    return {**alternatives, **methods, ParameterServer.name: ServedConfig}


class Training:
    """A training of a task, the same on all ranks. Gradients that are in flight at its end are dropped.

    With ``own_pace`` each rank takes steps at its own pace, on batches from a work queue.
    """

    def __init__(self, task: Task, name: str, config: Any) -> None:
        self.task = task
        model = BenchModel(task.name, task.build_module_there(), [], lambda rank: None, task.loss, task.optimizer)
        self.candidate = _candidate(task, model, name, config)
        self.run_passes: RunPasses = forward_and_backward
        self.candidate.run_passes = self._run_passes
        self._num_steps = 0
        self.own_pace = isinstance(self.candidate, ServedCandidate) and self.candidate.own_pace

    @property
    def module(self) -> nn.Module:
        """The module that is trained."""
        return self.candidate.model.module

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps in which each rank uses its share of the training data once."""
        return -(-len(self._sampler(0)) // self.task.batch_size)

    def loader(self, seed: int) -> TrainLoader:
        """Returns this rank's training loader, whose iterations are successive epochs; a collective call."""
        loader: DataLoader[Any]
        task = self.task
        loader = DataLoader(task.train_set, task.batch_size, sampler=self._sampler(seed), num_workers=task.workers)
        if isinstance(self.candidate, MethodCandidate):
            prepared: TrainLoader = self.candidate.sync.prepare_train_loader(loader, seed)
            return prepared
        return TrainLoader(with_seed_of_its_own(loader), finish=lambda batch: batch)

    def step(self, batch: Any) -> None:
        """Takes one training step."""
        self.candidate.step(self.task.batch_there(batch))
        self._num_steps += 1

    @contextmanager
    def consolidated(self) -> Iterator[nn.Module]:
        """Yields the module with the consolidated weights; a collective call."""
        if not isinstance(self.candidate, MethodCandidate):
            yield self.module
            return
        self.candidate.sync.flush()
        yield self.module
        self.candidate.sync.resume()

    @property
    def mib_sent(self) -> float:
        """MiB that this rank has sent in steps so far; of DDP, which does not count, the least of its all-reduces."""
        if isinstance(self.candidate, MethodCandidate):
            return cast(float, self.candidate.sync.metrics()["mib_sent"])
        if mib_after := getattr(self.candidate, "mib_after", None):
            return cast(float, mib_after(self._num_steps))
        return (1 - (self.lssr or 0.0)) * least_mib(gradient_bytes(self.candidate.model) * self._num_steps)

    @property
    def mib_beside_steps(self) -> float:
        """MiB that this rank has sent besides; of what is no method of this package, 0."""
        if not isinstance(self.candidate, MethodCandidate):
            return 0.0
        return cast(float, self.candidate.sync.metrics()["mib_beside_steps"])

    @property
    def lssr(self) -> float | None:
        """The share of local steps (SelSync, Eq. 4); None if it is not defined."""
        if isinstance(self.candidate, MethodCandidate):
            return cast("float | None", self.candidate.sync.metrics().get("lssr"))
        return float(self.candidate.name == ALONE)

    @property
    def staleness(self) -> list[int] | None:
        """The numbers of gradients that were 0, 1, ... updates stale, on rank 0; None: it is not counted."""
        if not self.own_pace or dist.get_rank() != 0:
            return None
        sync = cast(ServedCandidate, self.candidate).sync
        found = [staleness for update in sync.log for staleness in update.staleness]
        return [found.count(number) for number in range(max(found, default=-1) + 1)]

    def at_own_pace(self, seed: int, num_steps: int, evaluations: int) -> Iterator[tuple[dict[str, float], nn.Module]]:
        """Trains on as many samples as ``num_steps`` steps of all ranks have; a collective call.

        Nobody waits for a measurement: the rank that takes the first batch of the next part of the training from the
        queue has just received weights, and copies them. The learning rate follows the batches that were taken.

        Yields, after the training, for the end of each of ``evaluations`` equal parts: ``steps``, the seconds since the
        beginning, the MiB that rank 0 has sent, evenly divided; and a module with the weights, the same on all ranks,
        which is valid until the next one.
        """
        loader = self.loader(seed)
        order = cast(WorkQueueBatches, loader.batch_sampler)
        num_batches = round(num_steps / self.steps_per_epoch * order.num_batches)
        scheduler = self.task.scheduler(self.candidate.optimizer, num_steps)
        ends = {1 + i * num_batches // evaluations: i for i in range(1, evaluations)}
        copies: dict[int, tuple[float, dict[str, Tensor]]] = {}
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
        for i, (seconds, module) in enumerate(self._on_all_ranks(copies), start=1):
            share = i / evaluations
            yield {"steps": share * num_steps, "seconds": seconds, "mib": share * self.mib_sent}, module

    def close(self) -> None:
        """Ends threads and process groups."""
        self.candidate.close()

    def _run_passes(self, forward: Callable[[], Tensor], check: Callable[[], object]) -> Any:
        """Runs forward and backward pass, and clips the gradient."""
        loss = self.run_passes(forward, check)
        if self.task.max_norm is not None:
            if isinstance(self.candidate, MethodCandidate):
                self.candidate.sync.clip(self.task.max_norm)
            else:
                nn.utils.clip_grad_norm_(self.candidate.module.parameters(), self.task.max_norm)
        return loss

    def _sampler(self, seed: int) -> DistributedSampler[Any]:
        if self.task.labels is None or self.task.labels_per_worker is None:
            return DistributedSampler(self.task.train_set, seed=seed)
        return LabelSkewedSampler(self.task.labels, self.task.labels_per_worker, seed=seed)

    def _on_all_ranks(self, copies: dict[int, tuple[float, dict[str, Tensor]]]) -> Iterator[tuple[float, nn.Module]]:
        """Yields the copies of all ranks, in their order, on all ranks; a collective call."""
        seconds_of = {i: seconds for i, (seconds, _) in copies.items()}
        all_seconds: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(all_seconds, seconds_of)
        holders = {i: rank for rank, held in enumerate(all_seconds) for i in held}
        module = self.task.build_module_there()
        for i in sorted(holders):
            if i in copies:
                module.load_state_dict(copies[i][1])
            for tensor in module.state_dict().values():
                dist.broadcast(tensor, holders[i])
            yield all_seconds[holders[i]][i], module


def _candidate(task: Task, model: BenchModel, name: str, config: Any) -> Trainable:
    if name in ALTERNATIVES:
        _, make = ALTERNATIVES[name]
        return make(model, config)
    if name == ParameterServer.name:
        return ServedCandidate(model, config, divided_data=task.labels_per_worker is not None)
    return MethodCandidate(model, METHODS[name], BenchCandidate(name, config))


def _weights_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}
