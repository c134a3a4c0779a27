"""SelSync and local SGD by virtual workers: each has a replica of the weights, with the methods' own decisions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.tasks import Task
from benchmarks.virtual_workers.all_reduce import AllReduce
from benchmarks.virtual_workers.batches import Batch
from benchmarks.virtual_workers.training import VirtualTraining
from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.core.torch_private import twin_optimizer
from lightning_pipesync.methods.local_sgd.clock import BY_GRADIENT, Rounds, steps_of
from lightning_pipesync.methods.replicas.averages import divide_layers
from lightning_pipesync.methods.replicas.gradient_change import GradientChangeTracker, Threshold
from lightning_pipesync.methods.replicas.groups import neighborhood, number_of_participants, participants
from lightning_pipesync.methods.replicas.rate_factor import RateFactor
from lightning_pipesync.methods.replicas.settings import ReplicaSettings
from lightning_pipesync.methods.replicas.step_size import ADAMS, StepSize
from lightning_pipesync.methods.selsync.config import SelSyncConfig


class ReplicaTraining(VirtualTraining):
    """Trainings whose workers take local steps, and average their weights at times.

    ``steps_per_epoch`` is for a period in epochs.
    """

    simulated = frozenset(
        {
            *("delta", "lssr", "window", "smoothing", "aggregation", "partition", "full_pass", "injection"),
            *("compression", "error_feedback", "residual_decay", "outer_lr", "outer_momentum", "outer_optimizer"),
            *("period", "participation", "neighbors", "lr_scale", "warmup_steps", "elastic_force", "fragments"),
            *("overlap_steps", "mixing_factor", "average_optimizer_states", "follow_lr"),
        }
    )

    def __init__(self, task: Task, config: ReplicaSettings, *rest: Any, steps_per_epoch: int | None = None) -> None:
        super().__init__(task, config, *rest)
        self._config = config
        period = getattr(config, "period", BY_GRADIENT)
        self._rounds, self._period = None, 0
        if period != BY_GRADIENT:
            self._period = steps_of(period, steps_per_epoch)
            self._rounds = Rounds(self._period, config.fragments)
        follows = config.follow_lr if self._rounds is None else getattr(config, "periods_follow_lr", False)
        self._factor = RateFactor(self.optimizer if follows else None)
        self._triggers = [_Trigger(config, self.num_workers) for _ in range(self.num_trainings)]
        self._averages_gradients = isinstance(config, SelSyncConfig) and config.aggregation == "gradients"
        columns = self.model.layers(config.fragments, divide_layers)
        self._averages = [
            _Averages(config, self.optimizer, weights, columns) for weights in self.of_trainings(self.weights.detach())
        ]
        self._step_sizes: list[StepSize] = []  # of each row, from the first step on, which has no scale

    @property
    def lssr(self) -> list[float]:
        return [averages.num_local / self.num_steps for averages in self._averages]

    def consolidated(self) -> tuple[Tensor, Tensor]:
        buffers = self.of_trainings(self.buffers).mean(dim=1)
        return torch.stack([averages.consolidated() for averages in self._averages]), buffers

    def _step(self, batches: Sequence[Batch]) -> None:
        gradients, warmup = self.compute_gradients(batches), self._config.warmup_steps
        step = self.num_steps + 1 - warmup
        if step <= 0:
            self.average_over_workers(gradients)
        starts = self._starts(gradients, step) if step > 0 else [0] * self.num_trainings
        if self._averages_gradients:
            for of_training, synchronized in zip(self.of_trainings(gradients), starts, strict=True):
                if synchronized:
                    of_training.copy_(of_training.sum(dim=0) / self.num_workers)
        self.clip(gradients)
        self._update(is_local=step > 0)
        if step == 0:
            for averages in self._averages:
                averages.set_global()
        if step <= 0:
            return
        for training, (averages, number) in enumerate(zip(self._averages, starts, strict=True)):
            if averages.end_step(step, number, self._averages_gradients):
                self._end_round(training, averages)

    def _starts(self, gradients: Tensor, step: int) -> list[int]:
        """Returns how many fragments each training begins to average at the end of this step."""
        factor = self._factor.now()
        if self._rounds is not None:
            number = self._rounds.started(step)
            if self._rounds.ends_at(step):
                self._rounds = self._rounds.followed(step, int(factor * self._period))
            return [number] * self.num_trainings
        squared = self.of_trainings(torch.linalg.vector_norm(gradients, dim=1, dtype=torch.float64).square()).tolist()
        return [int(trigger.decides(norms, factor)) for trigger, norms in zip(self._triggers, squared, strict=True)]

    def _update(self, is_local: bool) -> None:
        """Takes the optimizer's step, in a local one with scaled learning rates (:class:`StepSize`)."""
        scale = self._config.scale_of_steps
        scales = torch.tensor([[size.scale] for size in self._step_sizes] if scale == "auto" else [[scale]])
        if not is_local or bool((scales == 1).all()):
            self.optimizer.step()
        else:
            [group] = self.optimizer.param_groups
            before = self.weights.detach().clone()
            if group.get("decoupled_weight_decay"):
                before.mul_(1 - group["lr"] * group["weight_decay"])
            self.optimizer.step()
            self.weights.sub_(before).mul_(scales).add_(before)
        if is_local and scale == "auto" and isinstance(self.optimizer, ADAMS):
            if not self._step_sizes:
                number = max(1, number_of_participants(self._config.participation, self.num_workers))
                self._step_sizes = [StepSize(self._of_row(row), scale, number) for row in range(len(self.weights))]
            for size in self._step_sizes:
                with size.in_use():
                    pass  # the step was taken with all rows

    def _of_row(self, row: int) -> Any:
        """Returns an optimizer of one row of the weights and of the states, which it shares."""
        own = nn.Parameter(self.weights.detach()[row])
        assert self.weights.grad is not None
        own.grad = self.weights.grad[row]
        state = {
            k: v[row] if isinstance(v, Tensor) and v.dim() else v for k, v in self.optimizer.state[self.weights].items()
        }
        groups = [{**group, "params": [own]} for group in self.optimizer.param_groups]
        return twin_optimizer(self.optimizer, groups, {own: state})

    def _end_round(self, training: int, averages: _Averages) -> None:
        rows = slice(training * self.num_workers, (training + 1) * self.num_workers)
        states = self.optimizer.state[self.weights].values() if self._config.average_optimizer_states else ()
        for state in states:
            if isinstance(state, Tensor) and state.dim():
                state[rows] = state[rows].mean(dim=0)
        self.buffers[rows] = averages.mixed(self.buffers[rows])


class _Trigger:
    """The decisions of SelSync in one training (Algorithm 1, lines 8 to 15)."""

    def __init__(self, config: ReplicaSettings, num_workers: int) -> None:
        self._trackers = [GradientChangeTracker(config.window, config.smoothing) for _ in range(num_workers)]
        self._threshold = Threshold(config)

    def decides(self, squared_norms: Sequence[float], rate_factor: float) -> bool:
        largest = max(t.update(norm) for t, norm in zip(self._trackers, squared_norms, strict=True))
        synchronized = largest >= self._threshold.delta and self._threshold.delta < math.inf
        if not math.isinf(largest):
            self._threshold.update(synchronized, rate_factor)
        return synchronized


@dataclass
class _Pending:
    """An average of a fragment between its start and the step at whose end it is applied."""

    due: int
    result: Tensor | None  # None: with an elastic force nothing is replaced
    start: Tensor


class _Averages:
    """The averages of the replicas of one training, fragment by fragment, and their global weights.

    ``weights`` are the workers', ``[workers, size]``, which change in place; ``columns`` are those of the fragments.
    """

    def __init__(self, config: ReplicaSettings, optimizer: Any, weights: Tensor, columns: Sequence[slice]) -> None:
        self._config, self._weights, self._columns = config, weights, columns
        number = len(weights)
        outer, self._force = config.outer_step(optimizer, number), config.elastic_force_of(number)
        codec, feedback = config.codec_of_weights
        sizes = [part.stop - part.start for part in columns]
        self._all_reduces = [AllReduce(get_codec(codec), feedback, 1, number, size) for size in sizes]
        self._global: list[Tensor] | None = None
        if outer is not None or not get_codec(codec).lossless:
            self._global = [weights[0, part].clone() for part in columns]
        self._outer = [outer([each]) for each in self._global] if outer and self._global else []
        self._pending: dict[int, _Pending] = {}
        self._num_started = self.num_local = 0

    @property
    def _num_rounds(self) -> int:
        return self._num_started // self._config.fragments

    def set_global(self) -> None:
        """Sets the global weights to the workers', which are the same."""
        for part, own in zip(self._columns, self._global or (), strict=False):
            own.copy_(self._weights[0, part])

    def consolidated(self) -> Tensor:
        """Returns the weights ``[size]`` that are evaluated."""
        if self._force:
            assert self._global is not None
            return torch.cat(self._global)
        return self._weights.mean(dim=0)

    def end_step(self, step: int, number: int, gradients_averaged: bool) -> bool:
        """Applies what is due, and starts ``number`` averages; returns whether a round has ended."""
        for fragment in [fragment for fragment, pending in self._pending.items() if pending.due == step]:
            self._apply(fragment, self._pending.pop(fragment))
        if number and gradients_averaged:
            return True
        fragments = self._config.fragments
        following = [(self._num_started + i) % fragments for i in range(number)]
        due = [fragment for fragment in following if fragment not in self._pending]
        self.num_local += not due
        for fragment in due:
            pending = self._start(fragment, step)
            self._num_started += 1
            if self._config.overlap_steps:
                self._pending[fragment] = pending
            else:
                self._apply(fragment, pending)
        return bool(due) and self._num_started % fragments == 0

    def mixed(self, rows: Tensor) -> Tensor:
        """Returns what replicas have after a round of the weights in ``rows``: means of all, or of neighbors."""
        if self._config.neighbors == "all":
            return rows.mean(dim=0).expand_as(rows)
        return torch.stack([rows[members].mean(dim=0) for members in self._neighborhoods(self._num_rounds - 1)])

    def _start(self, fragment: int, step: int) -> _Pending:
        own, config = self._weights[:, self._columns[fragment]], self._config
        start, due = own.clone(), step + config.overlap_steps
        number, round_ = len(own), self._num_rounds
        if config.neighbors != "all":
            result = torch.stack([own[members].mean(dim=0) for members in self._neighborhoods(round_)])
            return _Pending(due, result, start)
        taking_part = number_of_participants(config.participation, number)
        ranks = list(range(number)) if taking_part == number else participants(taking_part, number, round_)
        if self._global is None:
            return _Pending(due, own[ranks].sum(dim=0) / len(ranks), start)
        weights, all_reduce = self._global[fragment], self._all_reduces[fragment]
        movements = own - weights
        if self._force:
            own.sub_(movements, alpha=self._force)
        all_reduce.decay(config.decay_of_residuals)
        if len(ranks) < number:  # only without a codec
            change = self._moved(fragment, movements[ranks].sum(dim=0, keepdim=True) / len(ranks))
        else:
            change = all_reduce.mean(movements.unsqueeze(0), lambda mean: self._moved(fragment, mean))
        weights.add_(change[0])
        return _Pending(due, None if self._force else weights.clone(), start)

    def _moved(self, fragment: int, mean: Tensor) -> Tensor:
        """Returns by how much the outer step moves the global weights, ``[1, size]``, given the mean movement."""
        if not self._outer:
            return mean
        assert self._global is not None
        weights = self._global[fragment]
        before = weights.clone()
        weights.grad = -mean[0]
        self._outer[fragment].step()
        change = (weights - before).unsqueeze(0)
        weights.copy_(before)
        return change

    def _apply(self, fragment: int, pending: _Pending) -> None:
        if pending.result is None:
            return
        own, mixing = self._weights[:, self._columns[fragment]], self._config.mixing_factor
        if not self._config.overlap_steps:
            own.copy_(pending.result)
        elif mixing == "progress":
            own.add_(pending.result - pending.start)
        else:
            own.lerp_(pending.result.expand_as(own), 1 - mixing)

    def _neighborhoods(self, round_: int) -> list[list[int]]:
        number = len(self._weights)
        return [neighborhood(self._config.neighbors, replica, number, round_) for replica in range(number)]
