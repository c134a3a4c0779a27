"""The rounds of one optimizer's parameters: local steps, and averages of fragments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_pipesync.core.consistency import check_same
from lightning_pipesync.core.exchange import exchange_fused
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.core.transport import Transport
from lightning_pipesync.data.training_data import TrainingData
from lightning_pipesync.methods.local_sgd.algorithm import Rounds, number_of_participants, participants
from lightning_pipesync.methods.local_sgd.config import LocalSGDConfig
from lightning_pipesync.methods.local_sgd.fragments import Fragments
from lightning_pipesync.methods.local_sgd.period import BY_GRADIENT, epochs_of, steps_of
from lightning_pipesync.methods.local_sgd.warm_up import WarmUp
from lightning_pipesync.methods.method import parameters_of
from lightning_pipesync.methods.selsync.trigger import GradientTrigger


class OptimizerRounds:
    """Counts the steps of an optimizer, and averages its parameters when it is time, or when its gradient says so.

    Args:
        optimizer: the user's own.
        parameters: those of its parameters that no earlier optimizer has, in the order of their layers.
        config: the settings.
        transport: the way to the other ranks.
        data: knows how many steps an epoch has.

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
    ) -> None:
        self._optimizer, self._config, self._transport, self._data = optimizer, config, transport, data
        self.num_steps = self.num_local_steps = 0
        self._fragments = Fragments(parameters, config, transport)
        self.replicas = self._fragments.replicas
        self._num_participants = number_of_participants(config.participation, transport.world_size)
        self._num_started = 0  # averages of fragments
        self._rounds: Rounds | None = None
        self._trigger: GradientTrigger | None = None
        if config.period == BY_GRADIENT:
            tensors = [parameter.tensor for parameter in parameters]
            self._trigger = GradientTrigger(tensors, config, type(optimizer).__name__, transport)
        self._warm_up: WarmUp | None = None
        self._set_warm_up()

    @property
    def num_rounds(self) -> int:
        """Number of rounds in which each fragment was averaged."""
        return self._num_started // self._config.fragments

    def take_gradient(self) -> bool:
        """Averages the gradient in the warm-up; afterwards measures it, if it decides when to average the weights.

        Returns:
            Whether the gradient was averaged with one that is not finite.

        Raises:
            RuntimeError: the optimizer has got parameters that are not averaged; some rank is about to consolidate the
                weights; or a peer is lost.
        """
        if self._warm_up is not None:
            return self._warm_up.average()
        if self._trigger is not None:
            self._trigger.measure()
        return False

    def skip_step(self) -> None:
        """Ends a step that the user has skipped after :meth:`take_gradient`.

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
                self._warm_up = None
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
        if self._trigger is not None and self._warm_up is None:
            self._trigger.check_consolidation()
        self._fragments.check_consolidation(self.num_steps)

    def drop_averages(self) -> None:
        """Drops the averages under way: training continues from other weights."""
        self._fragments.drop()

    def state_dict(self) -> dict[str, Any]:
        """Returns optimizer state, this rank's replica, the outer optimizer's state, averages under way, counters."""
        return {
            "optimizer": self._optimizer.state_dict(),
            "fragments": self._fragments.state_dict(),
            "trigger": self._trigger.state_dict() if self._trigger else {},
            "steps": [self.num_steps, self.num_local_steps],
            "started": self._num_started,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from what :meth:`state_dict` returned on this rank."""
        self._fragments.load_state_dict(state["fragments"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.num_steps, self.num_local_steps = state["steps"]
        self._num_started = state["started"]
        if self._trigger is not None and state["trigger"]:
            self._trigger.load_state_dict(state["trigger"])
        self._set_warm_up()

    def _set_warm_up(self) -> None:
        warming_up = self.num_steps < self._config.warmup_steps
        self._warm_up = WarmUp(self._optimizer, self._fragments.buckets, self._transport) if warming_up else None

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
        """Returns the ranks whose weights are averaged; None: all."""
        world_size = self._transport.world_size
        if self._num_participants == world_size:
            return None
        return participants(self._num_participants, world_size, round_)

    def _end_round(self) -> None:
        config = self._config
        if config.average_optimizer_states:
            self._average_states()
        if not config.overlap_steps and config.fragments == 1 and config.outer_optimizer != "elastic":
            self.replicas.diverged = False

    def _average_states(self) -> None:
        """Averages the optimizer states that all ranks have; counters of steps stay."""
        states = {
            (index, kind): value
            for index, parameter in enumerate(parameters_of(self._optimizer))
            for kind, value in self._optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and value.dim() and value.is_floating_point()
        }
        everywhere = set.intersection(*(set(names) for names in self._transport.gather_objects(list(states))))
        shared = [states[name] for name in sorted(everywhere)]
        exchange_fused(shared, self._config.bucket_mb, lambda flat: self._transport.all_reduce(flat, mean=True))
