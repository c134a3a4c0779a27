"""SGD with parameter servers from the logs of simulated learners, in one process: a training for each log, all at once.

A log says which gradients, of which versions of the weights, make each update. The trainings are computed update by
update, as batched matrix products, so that a log of thousands of updates takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from benchmarks.pipelines.vectorized import Dense
from lightning_pipesync.methods.servers.messages import Gradient, Update

#: A learner, and the number of its pass.
Pass: TypeAlias = tuple[int, int]
#: Returns the mini-batches of a pass of each training: inputs ``[trainings, samples, inputs]``, and labels.
Batches: TypeAlias = Callable[[Sequence[Pass]], tuple[Tensor, Tensor]]


class ServedTrainings:
    """Trainings with logs of as many updates, of which each has as many gradients.

    Args:
        model: the layers.
        initial: the initial weights, ``[trainings, size]``.
        logs: the updates of each training.
        batches: the mini-batches.
        make_optimizer: returns the servers' optimizer, which has to be element-wise, of all trainings' weights.
        distance_bound: of ``staleness_lr="distance"``; None: the learning rate is that of the log.
    """

    def __init__(
        self,
        model: Dense,
        initial: Tensor,
        logs: Sequence[Sequence[Update]],
        batches: Batches,
        make_optimizer: Callable[[list[Tensor]], Optimizer],
        distance_bound: float | None = None,
    ) -> None:
        self.weights = initial.clone()
        self._model, self._logs, self._batches, self._distance_bound = model, logs, batches, distance_bound
        self._optimizer = make_optimizer([self.weights])
        ages = (update.version - version for log in logs for update in log for version in _versions_of(update))
        oldest = max(ages, default=1)
        self._versions = initial.repeat(oldest + 1, 1, 1)  # a ring, by version
        self._rows = torch.arange(len(initial))
        num_learners = 1 + max(gradient.rank for log in logs for update in log for gradient in update.gradients)
        is_local = logs[0][0].gradients[0].accrued is not None
        self._learners = initial.repeat(num_learners, 1, 1) if is_local else initial.new_empty(0)
        self._mean = self._accrued if is_local else self._mean_of_gradients

    @torch.no_grad()
    def update(self, number: int) -> None:
        """Makes the update of this number, from 0, in all trainings."""
        updates = [log[number] for log in self._logs]
        self.weights.grad = self._mean(updates)
        self._optimizer.step()
        self._versions[(number + 1) % len(self._versions)] = self.weights

    def _version(self, numbers: Sequence[int]) -> Tensor:
        """Returns a version for each training."""
        return self._versions[torch.tensor(numbers) % len(self._versions), self._rows]

    def _mean_of_gradients(self, updates: Sequence[Update]) -> Tensor:
        """Returns the mean of the gradients of an update, each times its factor on the learning rate."""
        of_each = [*zip(*(update.gradients for update in updates), strict=True)]
        seen = torch.stack([self._version([gradient.version for gradient in one]) for one in of_each])
        factors = torch.tensor([[w * update.lr_factor for w in update.weights] for update in updates]).T
        if self._distance_bound is not None:  # Dutta et al., AISTATS 2018, Eq. 13, for each gradient
            factors = (self._distance_bound / (self.weights - seen).square_().sum(dim=2)).clamp_(max=1.0)
        gradients = self._gradients(seen, [[(gradient.rank, gradient.step) for gradient in one] for one in of_each])
        return gradients.mul_(factors.unsqueeze(2)).mean(dim=0)

    def _accrued(self, updates: Sequence[Update]) -> Tensor:
        """Returns what the learners have accrued in their local steps (Dean et al., Algorithm 7.1)."""
        pushed = [update.gradients[0] for update in updates]
        ranks = torch.tensor([one.rank for one in pushed])
        own = self._learners[ranks, self._rows]
        total = torch.zeros_like(own)
        for steps in zip(*map(_steps_of, pushed), strict=True):
            passes = [(one.rank, step) for one, step in zip(pushed, steps, strict=True)]
            gradient = self._gradients(own.unsqueeze(0), [passes])[0]
            for row, (one, step) in enumerate(zip(pushed, steps, strict=True)):
                for fetch in one.accrued.fetches if one.accrued else ():
                    if fetch.step == step:
                        own[row] = self._versions[fetch.version % len(self._versions), row]
            total.add_(gradient)
            own.sub_(gradient, alpha=self._optimizer.param_groups[0]["lr"])
        self._learners[ranks, self._rows] = own
        return total

    def _gradients(self, seen: Tensor, of_each: Sequence[Sequence[Pass]]) -> Tensor:
        """Returns gradients at ``seen``, shaped like it: ``[gradients, trainings, size]``."""
        drawn = [self._batches(one) for one in of_each]
        x, y = (torch.cat(parts) for parts in zip(*drawn, strict=True))
        gradients, rows = torch.empty_like(seen), seen.flatten(0, 1)
        self._model.gradient(rows, rows, x, y, gradients.flatten(0, 1))
        return gradients


def _steps_of(gradient: Gradient) -> range:
    """Returns the local steps of which a learner has accrued the gradients."""
    assert gradient.accrued is not None
    return range(gradient.accrued.first_step, gradient.step + 1)


def _versions_of(update: Update) -> list[int]:
    """Returns the versions that an update needs."""
    fetched = [fetch.version for one in update.gradients if one.accrued for fetch in one.accrued.fetches]
    return fetched + [one.version for one in update.gradients if not one.accrued]
