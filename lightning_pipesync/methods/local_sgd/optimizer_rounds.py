"""The rounds of one optimizer's parameters: local steps, and averages of fragments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipesync.core.comm.exchange import exchange_fused
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.consistency import check_same
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.data.training_data import TrainingData
from lightning_pipesync.methods.local_sgd.clock import Rounds, number_of_participants, participants
from lightning_pipesync.methods.local_sgd.config import LocalSGDConfig
from lightning_pipesync.methods.local_sgd.fragments import Fragments
from lightning_pipesync.methods.local_sgd.gradients import SynchronousGradients
from lightning_pipesync.methods.local_sgd.period import BY_GRADIENT, epochs_of, steps_of
from lightning_pipesync.methods.method import parameters_of
from lightning_pipesync.methods.replicas.groups import replicas_of
from lightning_pipesync.methods.replicas.step_size import StepSize
from lightning_pipesync.methods.replicas.trigger import GradientTrigger


class OptimizerRounds:
    """Counts the steps of an optimizer, and averages its parameters when it is time, or when its gradient says so.

    Args:
        optimizer: the user's own.
        parameters: those of its parameters that no earlier optimizer has, in the order of their layers.
        config: the settings.
        transport: the way to the other ranks.
        data: knows how many steps an epoch has.
        starts_in_pass: see :class:`SynchronousGradients`.

    Attributes:
        replicas: averages the parameters.
        num_steps: number of steps so far.
        num_local_steps: number of steps so far after which nothing was averaged.

    Raises:
        ValueError: there are fewer layers than fragments.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[NamedParameter],
        config: LocalSGDConfig,
        transport: Transport,
        data: TrainingData,
        starts_in_pass: Callable[[Tensor], bool] | None,
    ) -> None:
        self._optimizer, self._config, self._transport, self._data = optimizer, config, transport, data
        self._starts_in_pass = starts_in_pass
        self.num_steps = self.num_local_steps = 0
        self._num_replicas = replicas_of(transport).world_size
        self._fragments = Fragments(parameters, config, transport)
        self.replicas = self._fragments.replicas
        # One at least, if ranks are lost: at the beginning a share that gives none is refused.
        self._num_participants = max(1, number_of_participants(config.participation, self._num_replicas))
        self._step_size = StepSize(optimizer, config.lr_scale, self._num_participants)
        self._num_started = 0  # averages of fragments
        self._rounds: Rounds | None = None
        self._trigger: GradientTrigger | None = None
        if config.period == BY_GRADIENT:
            tensors = [parameter.tensor for parameter in parameters]
            self._trigger = GradientTrigger(tensors, config, type(optimizer).__name__, transport)
        self._warm_up: SynchronousGradients | None = None
        self._in_group: SynchronousGradients | None = None
        self._set_warm_up()

    @property
    def num_rounds(self) -> int:
        """Number of rounds in which each fragment was averaged."""
        return self._num_started // self._config.fragments

    @property
    def meets_next(self) -> bool:
        """Whether an average starts or is applied at the end of the next step, or was to be applied and is dropped.

        It is the same on all ranks, of which some may not have come to a step yet whose average the others drop.
        """
        if self._warm_up is not None:
            return False
        if self._rounds is None:  # they may have to agree on it
            return True
        step, overlap = self.num_steps + 1 - self._config.warmup_steps, self._config.overlap_steps
        return self._rounds.started(step) > 0 or (step > overlap and self._rounds.started(step - overlap) > 0)

    @property
    def lr_scale(self) -> float:
        """Factor on the learning rate of local steps."""
        return self._step_size.scale

    def average_gradient(self) -> None:
        """Averages the gradient in the warm-up, later in the group.

        Raises:
            RuntimeError: the optimizer has got parameters that are not averaged; some rank is about to consolidate the
                weights; or a peer is lost.
        """
        if (gradients := self._warm_up or self._in_group) is not None:
            gradients.average()

    def measure_gradient(self) -> None:
        """Measures the gradient after the warm-up, if it decides about averages."""
        if self._warm_up is None and self._trigger is not None:
            self._trigger.measure()

    def in_step(self) -> AbstractContextManager[None]:
        """Returns a context in which ``optimizer.step`` has scaled learning rates, if the step is local."""
        return nullcontext() if self._warm_up is not None else self._step_size.in_use()

    def skip_step(self) -> None:
        """Ends a step that the user has skipped after :meth:`measure_gradient`.

        Raises:
            RuntimeError: another rank has not skipped it; or a peer is lost.
        """
        if self._trigger is not None:
            self._trigger.skip_step()

    def end_step(self) -> bool:
        """Ends a step: applies averages that are due, and starts others; returns whether a round has ended.

        Raises:
            RuntimeError: the ranks have not taken as many steps; or a peer is lost.
            ValueError: the period is a share of an epoch, whose steps are not known, or shorter than the overlap.
        """
        self.num_steps += 1
        if self._warm_up is not None:
            if self.num_steps == self._config.warmup_steps:
                self.replicas.agree_on_present()
                self._set_warm_up()
            return False
        self.replicas.diverged = True
        self._fragments.apply_due(self.num_steps)
        due = self._fragments_due()
        for fragment in due:
            round_, self._num_started = self.num_rounds, self._num_started + 1
            self._fragments.start(fragment, self.num_steps, self._ranks(round_))
        self.num_local_steps += not due
        ended = bool(due) and self._num_started % self._config.fragments == 0
        if ended:
            self._end_round()
        return ended

    def check_consolidation(self) -> None:
        """Checks that all ranks are about to consolidate the weights, after as many steps; settles the averages.

        Raises:
            RuntimeError: they differ; or a peer is lost.
        """
        self._drop_pass()
        if self._trigger is not None and self._warm_up is None:
            self._trigger.check_consolidation()
        self._fragments.check_consolidation(self.num_steps)

    def drop_averages(self) -> None:
        """Drops the averages under way: training continues from other weights."""
        self._drop_pass()
        self._fragments.drop()

    def snapshot(self) -> dict[str, Any]:
        """Returns copies of all that a round changes, without averages under way; not a collective call."""
        averaged = self._tensors_of_states().values() if self._config.average_optimizer_states else []
        return {
            "replicas": self._fragments.snapshot(),
            "averaged": [tensor.clone() for tensor in averaged],
            "steps": [self.num_steps, self.num_local_steps],
            "started": self._num_started,
            "rounds": None if self._rounds is None else vars(self._rounds),
            "step_size": self._step_size.state_dict(),
        }

    @torch.no_grad()
    def restore(self, snapshot: dict[str, Any]) -> None:
        """Continues from what :meth:`snapshot` returned on this rank, see :meth:`ReplicatedTensors.restore`."""
        self.replicas.restore(snapshot["replicas"])
        for tensor, value in zip(self._tensors_of_states().values(), snapshot["averaged"], strict=False):
            tensor.copy_(value)
        self.num_steps, self.num_local_steps = snapshot["steps"]
        self._num_started = snapshot["started"]
        self._rounds = None if snapshot["rounds"] is None else Rounds(**snapshot["rounds"])
        self._step_size.load_state_dict(snapshot["step_size"])
        self._set_warm_up()

    def state_dict(self) -> dict[str, Any]:
        """Returns optimizer state, this rank's replica, the outer optimizer's state, averages under way, counters."""
        self._drop_pass()
        return {
            "optimizer": self._optimizer.state_dict(),
            "fragments": self._fragments.state_dict(),
            "trigger": self._trigger.state_dict() if self._trigger else {},
            "step_size": self._step_size.state_dict(),
            "steps": [self.num_steps, self.num_local_steps],
            "started": self._num_started,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from what :meth:`state_dict` returned on this rank."""
        self._drop_pass()
        self._fragments.load_state_dict(state["fragments"])
        self._optimizer.load_state_dict(state["optimizer"])
        if "step_size" in state:  # not in checkpoints of earlier versions
            self._step_size.load_state_dict(state["step_size"])
        self.num_steps, self.num_local_steps = state["steps"]
        self._num_started = state["started"]
        if self._trigger is not None and state["trigger"]:
            self._trigger.load_state_dict(state["trigger"])
        self._set_warm_up()

    def close(self) -> None:
        """Ends the threads, and removes the hooks."""
        for gradients in (self._warm_up, self._in_group):
            if gradients is not None:
                gradients.close()

    def _set_warm_up(self) -> None:
        """Makes the gradients those of the warm-up, or of the group."""
        self.close()
        warming_up, in_group = self.num_steps < self._config.warmup_steps, self._transport.row is not None
        self._warm_up = self._synchronous(in_group=False) if warming_up else None
        self._in_group = self._synchronous(in_group=True) if in_group and not warming_up else None

    def _drop_pass(self) -> None:
        """Waits for averages of gradients that no step follows: what comes next may use the same group of ranks."""
        if (gradients := self._warm_up or self._in_group) is not None:
            gradients.drop()

    def _synchronous(self, in_group: bool) -> SynchronousGradients:
        buckets, starts = self._fragments.buckets, self._starts_in_pass
        return SynchronousGradients(self._optimizer, buckets, self._transport, in_group, starts)

    def _fragments_due(self) -> list[int]:
        """Returns the fragments whose average starts now: the next ones in turn."""
        fragments = self._config.fragments
        if self._trigger is not None:
            synchronized = self._trigger.decide().synchronized
            self._trigger.finish_step()
            number = int(synchronized and self._num_started % fragments not in self._fragments)
        else:
            self._rounds = self._rounds or self._planned()
            number = self._rounds.started(self.num_steps - self._config.warmup_steps)
        return [(self._num_started + i) % fragments for i in range(number)]

    def _planned(self) -> Rounds:
        """Returns the rounds; a collective call if the period is a share of an epoch."""
        period, steps_per_epoch = self._config.period, None
        if epochs_of(period):
            steps_per_epoch = self._data.steps_per_epoch()
            check_same(self._transport, [("the number of steps of an epoch", str(steps_per_epoch))])
        steps = steps_of(period, steps_per_epoch)
        if self._config.overlap_steps > steps:
            raise ValueError(
                f"overlap_steps={self._config.overlap_steps!r} is longer than period={period!r}, {steps} steps of "
                f"{steps_per_epoch}: a fragment's average must be applied before the next one of it starts."
            )
        return Rounds(steps, self._config.fragments)

    def _ranks(self, round_: int) -> list[int] | None:
        """Returns the replicas whose weights are averaged; None: all."""
        if self._num_participants == self._num_replicas:
            return None
        return participants(self._num_participants, self._num_replicas, round_)

    def _end_round(self) -> None:
        config = self._config
        if config.average_optimizer_states:
            self._average_states()
        if not config.overlap_steps and config.fragments == 1 and config.outer_optimizer != "elastic":
            self.replicas.diverged = False

    def _average_states(self) -> None:
        """Averages the optimizer states that all ranks have; counters of steps stay."""
        states = self._tensors_of_states()
        everywhere = set.intersection(*(set(names) for names in self._transport.gather_objects(list(states))))
        shared = [states[name] for name in sorted(everywhere)]
        exchange_fused(shared, self._config.bucket_mb, lambda flat: self._transport.all_reduce(flat, mean=True))

    def _tensors_of_states(self) -> dict[tuple[int, str], Tensor]:
        """Returns the optimizer's states that can be averaged, by the index of the parameter and their name."""
        return {
            (index, kind): value
            for index, parameter in enumerate(parameters_of(self._optimizer))
            for kind, value in self._optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and value.dim() and value.is_floating_point()
        }
