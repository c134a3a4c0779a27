"""One optimizer, its parameters, and the decisions about its steps (SelSync, Algorithm 1, lines 8 to 15)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from torch.optim import Optimizer

from lightning_pipesync.core.buckets import Fusion, plan_buckets
from lightning_pipesync.core.handle import Handle
from lightning_pipesync.core.norm import SquaredNorm
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.core.transport import Transport
from lightning_pipesync.methods.selsync.config import SelSyncConfig
from lightning_pipesync.methods.selsync.gradients import GradientAggregation
from lightning_pipesync.methods.selsync.replica import ReplicatedTensors
from lightning_pipesync.methods.selsync.threshold import Threshold
from lightning_pipesync.methods.selsync.tracker import GradientChangeTracker
from lightning_pipesync.methods.step import StepGuard

#: So many local steps in a row are worth a warning.
MANY_LOCAL_STEPS = 500

# The bits of a rank's flag.
SYNCHRONIZE, MISSING_GRADIENT, NOT_FINITE = 1, 2, 4
# It has skipped an even or an odd number of steps. One of them is set, so that nothing else passes for a flag.
SKIPPED = 8, 16
# It takes no step: it is about to consolidate the weights.
CONSOLIDATE = 32
# Its change is not defined. It calls for a synchronized step, and says nothing about delta.
UNDEFINED = 64


@dataclass(frozen=True)
class Decision:
    """What became of one step. All but the change is the same on all ranks.

    Attributes:
        relative_change: this rank's relative gradient change (Eq. 2); infinite where it is not defined.
        delta: what it was compared with.
        synchronized: some rank's change was at least delta.
        missing_gradient: some rank had a parameter without a gradient.
        not_finite: some rank's gradient was not finite.
        undefined: some rank's change was not defined.
    """

    relative_change: float = math.inf
    delta: float = math.nan
    synchronized: bool = False
    missing_gradient: bool = False
    not_finite: bool = False
    undefined: bool = False


class OptimizerUnit:
    """Tracks one optimizer's gradient, and averages its parameters or their gradients.

    Args:
        optimizer: the user's own.
        parameters: those of its parameters that no earlier optimizer has.
        config: the settings.
        transport: the way to the other ranks.
    """

    def __init__(
        self, optimizer: Optimizer, parameters: Sequence[NamedParameter], config: SelSyncConfig, transport: Transport
    ) -> None:
        self.optimizer = optimizer
        self.parameters = [parameter.tensor for parameter in parameters]
        self.tracker = GradientChangeTracker(config.window, config.smoothing)
        self.threshold = Threshold(config)
        ready_order = parameters[::-1]
        buckets = [
            [parameter.tensor for parameter in bucket]
            for bucket in plan_buckets(ready_order, Fusion(bucket_mb=config.bucket_mb))
        ]
        by_gradients = config.aggregation == "gradients"
        codec, feeds_back = ("none", False) if by_gradients else (config.compression, config.feeds_back)
        self.replicas = ReplicatedTensors(buckets, transport, codec, feeds_back, config.outer_step(optimizer))
        self.gradients: GradientAggregation | None = None
        if by_gradients:
            self.gradients = GradientAggregation(buckets, transport, config.compression, config.feeds_back)
        self._config, self._transport = config, transport
        self._norm: SquaredNorm | None = None
        self._change = math.inf
        self._flags: Handle[list[int]] | None = None
        self.flag_sent = False
        self.decision: Decision | None = None
        self.guard = StepGuard(optimizer, "SelSync")
        self._num_skipped = 0
        self._steps_in_a_row, self._largest_change = 0, 0.0

    def measure(self) -> None:
        """Starts to measure the gradient, in one pass."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        self._some_missing = len(gradients) < len(self.parameters)
        self._norm = SquaredNorm(gradients)

    def skip(self) -> None:
        """Forgets the measurement, if there is one: the user has skipped the update, or goes on accumulating.

        All ranks do so, or none. Each measurement has its flag, so that a rank that does otherwise is found out.

        Raises:
            RuntimeError: some rank did otherwise; or a peer is lost.
        """
        if self._norm is None:
            return
        self._num_skipped += 1
        if not self.flag_sent:
            self.send_flag()
        self._receive_flags()
        self.tracker.forget_last()
        self._forget()

    def agree_to_consolidate(self) -> None:
        """Checks that all ranks are about to consolidate the weights, and have skipped the same steps before.

        Raises:
            RuntimeError: they are not, or have not; or a peer is lost.
        """
        if not self._config.is_local:
            flag = self._skipped_flag(pending=self._norm is not None) | CONSOLIDATE
            self._check(self._transport.exchange_flags(flag).wait())

    def send_flag(self) -> None:
        """Takes the measurement, and tells the other ranks whether this rank calls for a synchronized step."""
        assert self._norm is not None
        squared_norm = self._norm.item()
        self._change = self.tracker.update(squared_norm)
        self.flag_sent = True
        if self._config.is_local:  # no step is ever synchronized: there is nothing to tell
            return
        flag = SYNCHRONIZE * (self._change >= self.threshold.delta)
        flag |= UNDEFINED * math.isinf(self._change)
        flag |= MISSING_GRADIENT * self._some_missing
        flag |= NOT_FINITE * (not math.isfinite(squared_norm))
        flag |= self._skipped_flag()
        self._flags = self._transport.exchange_flags(flag)

    def decide(self) -> Decision:
        """Waits for the flags of all ranks.

        Raises:
            RuntimeError: some rank has skipped a step that another one has taken; or a peer is lost.
        """
        union = 0
        for flag in self._receive_flags():
            union |= flag
        self.decision = Decision(
            self._change,
            self.threshold.delta,
            synchronized=bool(union & SYNCHRONIZE),
            missing_gradient=bool(union & MISSING_GRADIENT),
            not_finite=bool(union & NOT_FINITE),
            undefined=bool(union & UNDEFINED),
        )
        return self.decision

    def finish_step(self) -> None:
        """Gets ready for the next step."""
        assert self.decision is not None
        decision = self.decision
        self._forget()
        if not decision.undefined:
            self.threshold.follow(decision.synchronized)
        self._watch_local_steps(decision)

    def _forget(self) -> None:
        self._norm = self._flags = self.decision = None
        self.flag_sent = False

    def _skipped_flag(self, pending: bool = False) -> int:
        return SKIPPED[(self._num_skipped + pending) % 2]

    def _receive_flags(self) -> list[int]:
        flags = self._flags.wait() if self._flags else []
        self._check(flags)
        return flags

    def _check(self, flags: Sequence[int]) -> None:
        consolidating = [rank for rank, flag in enumerate(flags) if flag & CONSOLIDATE]
        if 0 < len(consolidating) < len(flags):
            raise RuntimeError(
                f"Rank {', '.join(map(str, consolidating))} is about to consolidate the weights, for an evaluation or "
                "a checkpoint, and the others take a step: all ranks have to do so together."
            )
        others = [rank for rank, flag in enumerate(flags) if flag & sum(SKIPPED) != flags[0] & sum(SKIPPED)]
        if others:
            raise RuntimeError(
                f"Rank {', '.join(map(str, others))} and rank 0 have not skipped the same steps of "
                f"{type(self.optimizer).__name__}. Once its gradient has been measured, by clipping it or by "
                "after_backward(), a step is taken by all ranks or by none: decide about it by what is the same on "
                "all ranks; to change nothing by a step, set the gradients to zero."
            )

    def _watch_local_steps(self, decision: Decision) -> None:
        """Says once if the delta that was set seems to be out of reach."""
        if decision.synchronized or self._config.delta == "auto" or self._config.is_local:
            self._steps_in_a_row, self._largest_change = 0, 0.0
            return
        self._steps_in_a_row += 1
        self._largest_change = max(self._largest_change, self._change)
        if self._steps_in_a_row == MANY_LOCAL_STEPS and self._transport.rank == 0:
            warnings.warn(
                f"SelSync has taken {MANY_LOCAL_STEPS} local steps in a row. The gradient of rank 0 changed by at most "
                f"{self._largest_change:.3g}, and delta={decision.delta:g}. If this is not intended, choose a smaller "
                "delta or delta='auto'.",
                stacklevel=4,
            )
