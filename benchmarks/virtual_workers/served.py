"""Parameter servers with virtual learners, whose paces and decisions are those of the real sequencer."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from benchmarks.learners.host_speed import HostSpeeds
from benchmarks.learners.simulated_learners import SimulatedLearners
from benchmarks.tasks import Task
from benchmarks.training import ServedConfig
from benchmarks.virtual_workers.batches import Batch
from benchmarks.virtual_workers.training import VirtualTraining
from lightning_pipesync.methods.servers.messages import Update

#: Passes take exponentially distributed times, as the lecture's.
_SPEEDS = HostSpeeds(stalling=1.0, stall_s=1.0)


class ServedTraining(VirtualTraining):
    """Updates by the gradients that the policy puts together, at the weights that their learners had.

    The rows are the servers' weights, one for each training. A step is as many gradients as there are learners.
    """

    simulated = frozenset({"policy", "k", "n", "staleness_bound", "staleness_lr", "servers", "lr_scale"})

    def __init__(
        self, task: Task, config: ServedConfig, num_learners: int, seeds: Sequence[int], num_steps: int
    ) -> None:
        super().__init__(task, config, 1, seeds, num_steps)
        if self.model.buffer_size or config.staleness_lr == "distance" or config.policy in ("easgd", "downpour"):
            raise ValueError(f"{config} is not simulated by virtual workers, nor are buffers with servers.")
        self._learners, policy = num_learners, config.policy_for(num_learners)
        self._steps_of_each = config.period if policy.by_steps else 1
        number = num_learners * num_steps // (policy.gradients * self._steps_of_each)
        runs = [SimulatedLearners(config, _SPEEDS.of_hosts(num_learners, seed)).updates() for seed in seeds]
        self._logs = [[update for _, update in islice(run, number)] for run in runs]
        oldest = max((late for log in self._logs for update in log for late in update.staleness), default=0)
        self._versions: deque[Tensor] = deque([self.weights.detach().clone()], maxlen=oldest + 1)
        self._batches: deque[tuple[Tensor, ...]] = deque()  # that no learner has used, of each training one
        self._num_updates = 0
        if not policy.by_steps:
            self._scale_rates(config.lr_scale or policy.gradients / num_learners)

    def _step(self, batches: Sequence[Batch]) -> None:
        [(_, tensors)] = batches
        for learner in range(self._learners):
            self._batches.append(tuple(tensor[learner :: self._learners] for tensor in tensors))
        while self._num_updates < len(self._logs[0]):
            updates = [log[self._num_updates] for log in self._logs]
            if len(updates[0].gradients) * self._steps_of_each > len(self._batches):
                return
            self._update(updates)

    def _update(self, updates: Sequence[Update]) -> None:
        pushed = [
            self._pushed([update.gradients[place] for update in updates]) for place in range(len(updates[0].gradients))
        ]
        factors = torch.tensor([[weight * update.lr_factor for weight in update.weights] for update in updates])
        self.weights.grad = (torch.stack(pushed) * factors.T.unsqueeze(2)).mean(dim=0)
        self.clip(self.weights.grad)
        self._take_step()
        self._num_updates += 1
        self._versions.append(self.weights.detach().clone())

    def _pushed(self, gradients: Sequence[Any]) -> Tensor:
        """Returns what a learner of each training pushes: ``[trainings, size]``."""
        return self.model.gradients(self._at([one.version for one in gradients]), self.buffers, self._batches.popleft())

    def _take_step(self) -> None:
        self.optimizer.step()

    def _at(self, versions: Sequence[int]) -> Tensor:
        """Returns the weights of a version for each training."""
        first = self._num_updates + 1 - len(self._versions)
        return torch.stack([self._versions[version - first][row] for row, version in enumerate(versions)])

    def _scale_rates(self, factor: float) -> None:
        self._scheduler.base_lrs = [rate * factor for rate in self._scheduler.base_lrs]
        for group in self.optimizer.param_groups:
            group["lr"] *= factor


class ServedReplicas(ServedTraining):
    """Asynchronous DiLoCo: learners push how far their own optimizers have moved the weights in a period."""

    simulated = frozenset({"policy", "k", "period", "outer_lr", "outer_momentum", "servers"})

    def __init__(self, task: Task, config: ServedConfig, *rest: Any) -> None:
        super().__init__(task, config, *rest)
        self._outer = config.outer_optimizer(self.optimizer)
        self._own: dict[tuple[int, int], tuple[nn.Parameter, Optimizer, LRScheduler]] = {}

    def _pushed(self, gradients: Sequence[Any]) -> Tensor:
        fetched = self._at([one.version for one in gradients])
        own = [self._learner(training, one.rank) for training, one in enumerate(gradients)]
        for (weights, _, _), row in zip(own, fetched, strict=True):
            weights.copy_(row)
        for _ in range(self._steps_of_each):
            seen = torch.stack([weights.detach() for weights, _, _ in own])
            found = self.model.gradients(seen, self.buffers, self._batches.popleft())
            self.clip(found)
            for (weights, optimizer, scheduler), gradient in zip(own, found, strict=True):
                while scheduler.last_epoch < self.num_steps:
                    scheduler.step()
                weights.grad = gradient
                optimizer.step()
        return fetched - torch.stack([weights.detach() for weights, _, _ in own])

    def clip(self, rows: Tensor) -> None:
        if rows is not self.weights.grad:  # movements are not clipped
            super().clip(rows)

    def _take_step(self) -> None:
        self._outer.step()

    def _learner(self, training: int, rank: int) -> tuple[nn.Parameter, Optimizer, LRScheduler]:
        if (training, rank) not in self._own:
            weights = nn.Parameter(self.weights.detach()[training].clone())
            optimizer = self.task.optimizer(nn.ParameterList([weights]))
            self._own[training, rank] = weights, optimizer, self.task.scheduler(optimizer, self.num_steps_planned)
        return self._own[training, rank]
