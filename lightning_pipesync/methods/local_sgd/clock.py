"""The clock of local SGD: at the end of which steps averages of fragments start, every period.

One rank does in a step (DiLoCo, Algorithm 1; Streaming DiLoCo, Algorithm 2)::

    update the weights                              # the inner optimizer
    for fragment whose average is due: replace its weights by the global ones, or blend both
    for fragment in the next rounds.started(step), in turn: start to average its weights
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.consistency import check_same
from lightning_pipesync.data.training_data import TrainingData
from lightning_pipesync.methods.replicas.flags import STEPS_AT_START, exchange_flags
from lightning_pipesync.methods.replicas.flags import check_same as check_equal
from lightning_pipesync.methods.replicas.policy import AveragingPolicy
from lightning_pipesync.methods.replicas.rate_factor import RateFactor

if TYPE_CHECKING:
    from lightning_pipesync.methods.local_sgd.config import LocalSGDConfig

#: ``period`` that leaves it to the gradient.
BY_GRADIENT = "selsync"

_WORDS = f"an integer number of steps of at least 1, a share of an epoch such as '0.25 epoch', or {BY_GRADIENT!r}"
Period = Annotated[int | str, _WORDS]

_EPOCHS = re.compile(r"(\d+|\d*\.\d+) ?epochs?")

OTHER_RATES = (
    "have learning rates that differ, and with follow_lr=True periods of different lengths: give all ranks the same "
    "schedule, or set follow_lr=False."
)


@dataclass(frozen=True)
class Rounds:
    """The rounds of the fragments. In each period a fragment is averaged once, at equal distances from the others."""

    period: int  # H, in steps
    fragments: int = 1
    begin: int = 0  # the step after which the first period begins

    def started(self, step: int) -> int:
        """Returns how many fragments' averages start at the end of a step, the last one's at the end of a period."""
        return self._started_until(step) - self._started_until(step - 1)

    def ends_at(self, step: int) -> bool:
        """Whether a period ends with a step."""
        return (step - self.begin) % self.period == 0

    def followed(self, step: int, period: int) -> Rounds:
        """Returns the rounds of another period after a step, with which one has ended."""
        return Rounds(period, self.fragments, step)

    def _started_until(self, step: int) -> int:
        # The first is due after a share 1 / fragments of the period, rounded down, but not before the first step.
        periods, within = divmod(step - self.begin, self.period)
        of_this = sum(0 < (f + 1) * self.period // self.fragments <= within for f in range(self.fragments))
        return periods * self.fragments + of_this


class PeriodClock(AveragingPolicy):
    """Starts averages by the number of steps; ``data`` knows the steps of an epoch.

    ``factor`` makes periods longer.
    """

    def __init__(self, config: LocalSGDConfig, data: TrainingData, transport: Transport, factor: RateFactor) -> None:
        self._config, self._data, self._transport, self._factor = config, data, transport, factor
        self._rounds: Rounds | None = None

    def may_start(self, step: int) -> bool:
        return self._rounds is None or self._rounds.started(step) > 0  # ranks may have to agree on the rounds first

    def end_step(self, step: int) -> int:
        """See :meth:`AveragingPolicy.end_step`.

        Raises:
            ValueError: the steps of an epoch are not known, or the period is shorter than the overlap.
            RuntimeError: ranks have different learning rates, which make the next period longer.
        """
        self._rounds = self._rounds or self._planned()
        number, factor = self._rounds.started(step), self._factor.now()
        if self._factor.changes and self._rounds.ends_at(step):
            self._rounds = self._rounds.followed(step, self._next_period(factor))
        return number

    def state_dict(self) -> dict[str, Any]:
        """Returns the rounds: the steps of a share of an epoch when the training began, which may change."""
        if self._rounds is None:
            return {}
        rounds = [self._rounds.period, self._rounds.begin]
        return {"period": self._config.period, "rounds": rounds, "largest_lr": self._factor.largest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues with as many steps, if ``period`` is the same as then."""
        self._rounds = None
        if state.get("period") == self._config.period:
            period, begin = state["rounds"]
            self._rounds = Rounds(period, self._config.fragments, begin)
            self._factor.largest = state["largest_lr"]

    def _planned(self) -> Rounds:
        """Returns the rounds; a collective call if the period is a share of an epoch."""
        period, overlap_steps, steps_per_epoch = self._config.period, self._config.overlap_steps, None
        if epochs_of(period):
            steps_per_epoch = self._data.steps_per_epoch()
            check_same(self._transport, [("the number of steps of an epoch", str(steps_per_epoch))])
        steps = steps_of(period, steps_per_epoch)
        if overlap_steps > steps:
            raise ValueError(
                f"overlap_steps={overlap_steps!r} is longer than period={period!r}, {steps} steps of "
                f"{steps_per_epoch}: a fragment's average must be applied before the next one of it starts."
            )
        return Rounds(steps, self._config.fragments)

    def _next_period(self, factor: float) -> int:
        """Returns the steps of the next period; a collective call: ranks with other rates would wait for each other."""
        period = int(factor * steps_of(self._config.period, None))
        flags = exchange_flags(self._transport, period % STEPS_AT_START)
        check_equal(flags, OTHER_RATES, ranks=self._transport.ranks)
        return period


def epochs_of(period: int | str) -> float | None:
    """Returns the number of epochs of a period such as ``"0.25 epoch"``; None for steps and ``"selsync"``.

    Raises:
        ValueError: ``period`` is none of these.
    """
    if period == BY_GRADIENT:
        return None
    if isinstance(period, str):
        match = _EPOCHS.fullmatch(period)
        if match and float(match[1]) > 0:
            return float(match[1])
    elif period >= 1:
        return None
    raise ValueError(f"period must be {_WORDS}, got {period!r}.")


def steps_of(period: int | str, steps_per_epoch: int | None) -> int:
    """Returns the steps of a period that is not ``"selsync"``; ``steps_per_epoch`` is None if it is not known.

    Raises:
        ValueError: the period is in epochs, whose steps are not known.
    """
    epochs = epochs_of(period)
    if epochs is None:
        return int(period)
    if steps_per_epoch is None:
        raise ValueError(
            f"period={period!r} needs to know how many steps an epoch has: give the training loader to "
            "prepare_train_loader(); if its data set has no length, set a number of steps."
        )
    return max(1, round(epochs * steps_per_epoch))
