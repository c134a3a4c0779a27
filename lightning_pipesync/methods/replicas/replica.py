"""The replica of the weights that an optimizer trains: its steps, and when they are averaged with other replicas."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipesync.core.comm.exchange import exchange_fused
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.parameters import NamedParameter, load_optimizer_state
from lightning_pipesync.core.torch_private import foreach_copy_
from lightning_pipesync.methods.method import parameters_of
from lightning_pipesync.methods.replicas.averages import Averages
from lightning_pipesync.methods.replicas.groups import neighborhood, number_of_participants, participants, replicas_of
from lightning_pipesync.methods.replicas.policy import AveragingPolicy
from lightning_pipesync.methods.replicas.settings import ReplicaSettings
from lightning_pipesync.methods.replicas.step_size import StepSize
from lightning_pipesync.methods.replicas.synchronous import SynchronousGradients
from lightning_pipesync.methods.replicas.weights import Weights

#: Steps after which an optimizer that has taken part in none of them counts as one that pauses.
PAUSES = 10


class Replica:
    """Counts the steps of an optimizer, and averages its parameters when the policy says so.

    ``parameters`` are those that no earlier optimizer has, layer by layer. After ``num_local_steps`` of the steps
    nothing was averaged.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[NamedParameter],
        config: ReplicaSettings,
        transport: Transport,
        policy: AveragingPolicy,
        starts_in_pass: Callable[[Tensor], bool] | None,
    ) -> None:
        self.optimizer, self.policy = optimizer, policy
        self._config, self._transport = config, transport
        self._starts_in_pass = starts_in_pass
        self.num_steps = self.num_local_steps = 0
        self.averages = Averages(optimizer, parameters, config, transport)
        replicas = replicas_of(transport)
        self._replica, self._num_replicas = replicas.rank, replicas.world_size
        # At least one when ranks are lost; at the beginning, a share that gives none is refused.
        self._num_participants = max(1, number_of_participants(config.participation, self._num_replicas))
        total = transport.sum_over_shards
        self._step_size = StepSize(optimizer, config.scale_of_steps, self._num_participants, total)
        self._num_started = 0  # averages of fragments
        self._states_diverged = False  # of the optimizers, from the first local step on
        self._gradients: SynchronousGradients | None = None  # of a warm-up or a group
        self._begin_phase()

    @property
    def num_rounds(self) -> int:
        """Number of rounds in which each fragment was averaged."""
        return self._num_started // self._config.fragments

    @property
    def neighborhood(self) -> list[int] | None:
        """This replica and its neighbors in the last round; None: all replicas."""
        return None if self._config.neighbors == "all" else self._averaged(self.num_rounds - 1)

    @property
    def meets_next(self) -> bool:
        """Whether an average may start or be due at the end of the next step, on any rank: this one may drop it."""
        due = self.num_steps + 1 - self._config.warmup_steps - self._config.overlap_steps
        return self.starts_in(1) or (not self._warming_up and due > 0 and self.policy.may_start(due))

    def starts_in(self, steps: int) -> bool:
        """Returns whether an average may start at the end of a later step: 1 is the next one."""
        return not self._warming_up and self.policy.may_start(self.num_steps + steps - self._config.warmup_steps)

    @property
    def lr_scale(self) -> float:
        """Factor on the learning rate of local steps."""
        return self._step_size.scale

    def average_gradient(self) -> None:
        """Averages the gradient, in a warm-up or in the group."""
        if self._gradients is not None:
            self._gradients.average()

    def complete_gradient(self) -> bool:
        """Shows the gradient to the policy after the warm-up; returns as :meth:`StepCalls._complete`."""
        return not self._warming_up and self.policy.complete_gradient()

    def in_step(self) -> AbstractContextManager[None]:
        """Returns a context in which ``optimizer.step`` scales the learning rates of a local step."""
        return nullcontext() if self._warming_up else self._step_size.in_use()

    def end_step(self, start: Callable[[], object] | None = None) -> bool:
        """Ends a step: applies averages that are due, and starts others; returns whether a round has ended.

        ``start`` starts the averages of all weights; None: they start here, by fragments.
        """
        ended = not self._warming_up and self._average_due(self.num_steps + 1, start)
        self.num_steps += 1
        if self.num_steps == self._config.warmup_steps:
            self.averages.reset_global()
            self._begin_phase()
        return ended

    def check_consolidation(self) -> None:
        """Checks that all ranks consolidate the weights, after as many steps; waits for the averages under way."""
        self._drop_pass()
        if not self._warming_up:
            self.policy.check_consolidation()
        self.averages.check_consolidation(self.num_steps)

    def drop_averages(self) -> None:
        """Drops the averages under way."""
        self._drop_pass()
        self.averages.drop()

    @property
    def changed_next(self) -> list[Weights]:
        """The buckets that the end of the next step may change."""
        return self.averages.changed_by(self.num_steps + 1)

    def snapshot(self, buckets: Container[Weights] | None = None) -> dict[str, Any]:
        """Returns a state that undoes a round, without averages under way; not a collective call.

        Args:
            buckets: those that may change before it is restored; None: all.
        """
        averaged = self._tensors_of_states().values() if self._config.average_optimizer_states else []
        return {
            "weights": self.averages.snapshot(buckets),
            "averaged": [tensor.clone() for tensor in averaged],
            **self._counters(),
        }

    @torch.no_grad()
    def restore(self, snapshot: dict[str, Any]) -> None:
        self.averages.load_state_dict(snapshot["weights"])
        if snapshot["averaged"]:
            foreach_copy_(list(self._tensors_of_states().values()), snapshot["averaged"])
        self._set_counters(snapshot)

    def state_dict(self) -> dict[str, Any]:
        """Returns the optimizer's state, this rank's replica, global weights, averages under way and counters."""
        with self._transport.watch.despite_loss():
            self._drop_pass()
        return {
            "optimizer": self.optimizer.state_dict(),
            "states_diverged": self._states_diverged,
            "weights": self.averages.state_dict(),
            **self._counters(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._drop_pass()
        self.averages.load_state_dict(state["weights"])
        load_optimizer_state(self.optimizer, state["optimizer"])
        self._states_diverged = state["states_diverged"]
        self._set_counters(state)

    def close(self) -> None:
        """Ends the threads, and removes the hooks."""
        if self._gradients is not None:
            self._gradients.close()

    def _average_due(self, step: int, start: Callable[[], object] | None) -> bool:
        self.averages.apply_due(step)
        number = self.policy.end_step(step - self._config.warmup_steps)
        if number and self.policy.averages_gradients:  # all ranks have applied the same gradient
            self.averages.diverged |= self._states_diverged
            return True
        self.averages.diverged = self._states_diverged = True
        due = self._next_fragments(number)
        self.num_local_steps += not due
        for fragment in due:
            ranks, self._num_started = self._averaged(self.num_rounds), self._num_started + 1
            if start is None:
                self.averages.start(fragment, step, ranks)
            else:
                start()
        ended = bool(due) and self._num_started % self._config.fragments == 0
        if ended:
            self._end_round()
        return ended

    def _counters(self) -> dict[str, Any]:
        return {
            "steps": [self.num_steps, self.num_local_steps],
            "started": self._num_started,
            "step_size": self._step_size.state_dict(),
            "policy": self.policy.state_dict(),
        }

    def _set_counters(self, state: dict[str, Any]) -> None:
        self.num_steps, self.num_local_steps = state["steps"]
        self._num_started = state["started"]
        self._step_size.load_state_dict(state["step_size"])
        self.policy.load_state_dict(state["policy"])
        self._begin_phase()

    def _begin_phase(self) -> None:
        """Averages gradients of all ranks in each step of the warm-up, later those of the group, if there is one."""
        self.close()
        self._warming_up = self.num_steps < self._config.warmup_steps
        self._gradients = None
        if self._warming_up or self._transport.row is not None:
            self._gradients = SynchronousGradients(
                self.optimizer,
                [bucket.tensors for bucket in self.averages.buckets],
                self._transport,
                in_group=not self._warming_up,
                starts_in_pass=self._starts_in_pass,
            )

    def _drop_pass(self) -> None:
        """Waits for averages of gradients that no step follows; the next exchange may use the same group of ranks."""
        if self._gradients is not None:
            self._gradients.drop()

    def _next_fragments(self, number: int) -> list[int]:
        """Returns the next ``number`` fragments in turn, except those whose average is under way."""
        fragments = self._config.fragments
        following = ((self._num_started + i) % fragments for i in range(number))
        return [fragment for fragment in following if fragment not in self.averages]

    def _averaged(self, round_: int) -> list[int] | None:
        """Returns whose weights this rank gets the average of in a round; None: of all."""
        if self._config.neighbors != "all":
            return neighborhood(self._config.neighbors, self._replica, self._num_replicas, round_)
        if self._num_participants == self._num_replicas:
            return None
        return participants(self._num_participants, self._num_replicas, round_)

    def _end_round(self) -> None:
        config = self._config
        if config.average_optimizer_states:
            self._average_states()
        whole = not config.overlap_steps and config.fragments == 1 and config.neighbors == "all"
        if whole and not config.elastic_force_of(self._num_replicas):
            self.averages.diverged = False

    def _average_states(self) -> None:
        """Averages the optimizer states that all ranks have."""
        states = self._tensors_of_states()
        everywhere = set.intersection(*(set(names) for names in self._transport.gather_objects(list(states))))
        shared = [states[name] for name in sorted(everywhere)]
        exchange_fused(shared, self._config.bucket_mb, lambda flat: self._transport.all_reduce(flat, mean=True))

    def _tensors_of_states(self) -> dict[tuple[int, str], Tensor]:
        """Returns the states that can be averaged, not counters of steps, by index of the parameter and name."""
        return {
            (index, kind): value
            for index, parameter in enumerate(parameters_of(self.optimizer))
            for kind, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and value.dim() and value.is_floating_point()
        }


class TrainingSteps:
    """Counts the steps of a training: one begins with each optimizer that has taken part in the present one already.

    Args:
        optimizers: their number.
    """

    def __init__(self, optimizers: int) -> None:
        self._number, self._latest = 0, [0] * optimizers  # the present step, and the last one of each optimizer

    def take_part(self, index: int) -> bool:
        """Notes that an optimizer is about to step; returns whether a step of the training begins with it."""
        begins = self._latest[index] == self._number
        self._number += begins
        self._latest[index] = self._number
        return begins

    @property
    def first(self) -> int:
        """The first optimizer that does not pause."""
        return min(self._active)

    @property
    def last(self) -> int:
        """The last optimizer that does not pause."""
        return max(self._active)

    @property
    def _active(self) -> list[int]:
        return [index for index, latest in enumerate(self._latest) if self._number - latest < PAUSES]
