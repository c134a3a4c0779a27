"""The training of a task by virtual workers, of some seeds at once; with DDP, and with Pipe-SGD."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.tasks import Task
from benchmarks.virtual_workers.all_reduce import AllReduce
from benchmarks.virtual_workers.batches import Batch
from benchmarks.virtual_workers.stacked_model import StackedModel
from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.core.torch_private import mark_stepped
from lightning_pipesync.methods.hyperparameters import Hyperparameters, current, in_use
from lightning_pipesync.methods.pipe_sgd.algorithm import Pipeline
from lightning_pipesync.methods.pipe_sgd.config import PipeSGDConfig
from lightning_pipesync.methods.pipe_sgd.prediction import PredictedWeights, TrialStep


class VirtualTraining(ABC):
    """Trainings of a task with a method, one for each seed, with ``num_workers`` each.

    Rows are workers, those of the first training first. One element-wise optimizer has the weights of all rows,
    ``[rows, size]``.

    Args:
        task: its optimizer has one parameter group.
        config: the settings of the method; None: it has none.
        num_workers: of each training.
        seeds: of the initial weights.
        num_steps: for the scheduler.

    Raises:
        ValueError: a setting is not simulated.
    """

    #: The settings that may differ from their defaults.
    simulated: frozenset[str] = frozenset()

    def __init__(self, task: Task, config: Any, num_workers: int, seeds: Sequence[int], num_steps: int) -> None:
        self.task, self.model = task, StackedModel(task)
        self.num_trainings, self.num_workers, self.num_steps_planned = len(seeds), num_workers, num_steps
        self._check(config)
        weights, buffers = zip(*map(self.model.initial, seeds), strict=True)
        self.weights = nn.Parameter(torch.stack(weights).repeat_interleave(num_workers, dim=0))
        self.buffers = torch.stack(buffers).repeat_interleave(num_workers, dim=0)
        self.weights.grad = torch.zeros_like(self.weights)
        self.optimizer = task.optimizer(nn.ParameterList([self.weights]))
        self._scheduler = task.scheduler(self.optimizer, num_steps)
        self.num_steps = 0

    @torch.no_grad()
    def step(self, batches: Sequence[Batch]) -> None:
        """Takes a step with all workers, and one of the scheduler."""
        self._step(batches)
        mark_stepped(self.optimizer)  # also where it makes no update yet
        self.num_steps += 1
        self._scheduler.step()

    @abstractmethod
    def _step(self, batches: Sequence[Batch]) -> None: ...

    def consolidated(self) -> tuple[Tensor, Tensor]:
        """Returns the weights ``[trainings, size]`` that are evaluated, and the buffers."""
        return self.of_trainings(self.weights.detach())[:, 0], self.of_trainings(self.buffers)[:, 0]

    @property
    def lssr(self) -> list[float]:
        """The share of local steps of each training (SelSync, Eq. 4)."""
        return [0.0] * self.num_trainings

    def of_trainings(self, rows: Tensor) -> Tensor:
        """Returns a view ``[trainings, workers, ...]``."""
        return rows.unflatten(0, (self.num_trainings, self.num_workers))

    def compute_gradients(self, batches: Sequence[Batch]) -> Tensor:
        """Computes the gradient of each row; returns it, which is ``weights.grad``."""
        gradients = self.weights.grad
        assert gradients is not None
        weights = self.weights.detach()
        for rows, tensors in batches:
            if len(rows) == len(weights):
                gradients.copy_(self.model.gradients(weights, self.buffers, tensors))
            else:
                buffers = self.buffers[rows]
                gradients[rows] = self.model.gradients(weights[rows], buffers, tensors)
                self.buffers[rows] = buffers
        return gradients

    def clip(self, rows: Tensor) -> None:
        """Clips the gradient in each row as the task says."""
        if self.task.max_norm is not None:
            norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
            rows.mul_((self.task.max_norm / (norms + 1e-6)).clamp_(max=1.0))

    def set_for_all(self, target: Tensor, of_trainings: Tensor) -> None:
        """Sets rows ``[rows, ...]`` to a value for each training, ``[trainings, ...]``."""
        self.of_trainings(target).copy_(of_trainings.unsqueeze(1))

    def average_over_workers(self, rows: Tensor) -> None:
        """Sets the rows of each training to their mean."""
        self.set_for_all(rows, self.of_trainings(rows).sum(dim=1) / self.num_workers)

    def _check(self, config: Any) -> None:
        """Raises a ValueError if the method would not do what ``config`` says."""
        if config is None:
            return
        for name, default in vars(type(config)()).items():
            if getattr(config, name) != default and name not in self.simulated:
                raise ValueError(f"{name}={getattr(config, name)!r} is not simulated by virtual workers: leave it out.")


class DDPTraining(VirtualTraining):
    """Averaged gradients; BatchNorm's statistics are the first worker's, as DDP has them."""

    def _step(self, batches: Sequence[Batch]) -> None:
        gradients = self.compute_gradients(batches)
        self.average_over_workers(gradients)
        self.set_for_all(self.buffers, self.of_trainings(self.buffers)[:, 0].clone())
        self.clip(gradients)
        self.optimizer.step()


@dataclass
class _InFlight:
    """A gradient between its step and its update."""

    own: Tensor  # [rows, size], of each worker
    mean: Tensor  # [trainings, size]
    hyperparameters: Hyperparameters
    num_updates: int


class PipeSGDTraining(VirtualTraining):
    """Gradients ``staleness`` steps late, by the method's own schedule and prediction of weights."""

    simulated = frozenset({"staleness", "warmup_steps", "compression", "error_feedback", "delay_compensation"})

    def __init__(self, task: Task, config: PipeSGDConfig, *rest: Any) -> None:
        super().__init__(task, config, *rest)
        if config.reduces_learning_rate:
            raise ValueError(f"delay_compensation={config.delay_compensation!r} is not simulated by virtual workers.")
        self._config = config
        self._pipeline: Pipeline[_InFlight] = Pipeline(config.staleness, config.warmup_steps)
        self._predicted = PredictedWeights(self.optimizer, self._expected_steps)
        codec, shape = get_codec(config.compression), (self.num_trainings, self.num_workers, self.model.size)
        self._all_reduce = AllReduce(codec, config.uses_error_feedback, *shape)

    def _step(self, batches: Sequence[Batch]) -> None:
        self._predicted.use()
        own = self.compute_gradients(batches).clone()
        self._predicted.forget()
        mean = self._all_reduce.mean(self.of_trainings(own))
        self._pipeline.submit(_InFlight(own, mean, current(self.optimizer), self._pipeline.num_updates))
        due = self._pipeline.due
        self.clip(own)  # with those it is predicted
        if due is not None:
            self._update(self._pipeline.retire())
        self._pipeline.end_step()

    def _update(self, due: _InFlight) -> None:
        assert self.weights.grad is not None
        self.set_for_all(self.weights.grad, due.mean)
        self.clip(self.weights.grad)
        with in_use(self.optimizer, due.hyperparameters, [later.hyperparameters for later in self._pipeline.in_flight]):
            self.optimizer.step()
        self._pipeline.count_update(due.num_updates)

    def _expected_steps(self) -> list[TrialStep]:
        if not self._config.predicts:
            return []
        kept, place = self._config.keeps_local_gradients, id(self.weights)
        return [
            TrialStep({place: gradient.own if kept else None}, gradient.hyperparameters)
            for gradient in self._pipeline.in_flight
        ]
