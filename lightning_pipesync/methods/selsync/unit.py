"""One optimizer, its parameters, and the decisions about its steps (SelSync, Algorithm 1, lines 8 to 15)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from torch.optim import Optimizer

from lightning_pipesync.core.buckets import Fusion, plan_buckets
from lightning_pipesync.core.handle import Handle
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.core.transport import Transport
from lightning_pipesync.methods.selsync.config import SelSyncConfig
from lightning_pipesync.methods.selsync.gradients import GradientAggregation
from lightning_pipesync.methods.selsync.replica import ReplicatedTensors
from lightning_pipesync.methods.selsync.tracker import GradientChangeTracker, SquaredNorm
from lightning_pipesync.methods.stepping import StepGuard

#: So many local steps in a row are worth a warning.
MANY_LOCAL_STEPS = 500

# The bits of a rank's flag.
SYNCHRONISE, MISSING_GRADIENT, NOT_FINITE = 1, 2, 4


@dataclass(frozen=True)
class Decision:
    """What became of one step. All but the change is the same on all ranks.

    Attributes:
        relative_change: this rank's relative gradient change (Eq. 2); infinite where it is not defined.
        synchronised: some rank's change was at least delta.
        missing_gradient: some rank had a parameter without a gradient.
        not_finite: some rank's gradient was not finite.
    """

    relative_change: float = math.inf
    synchronised: bool = False
    missing_gradient: bool = False
    not_finite: bool = False


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
        self.tracker = GradientChangeTracker(config.window, config.smoothing_factor(transport.world_size))
        ready_order = parameters[::-1]
        buckets = [
            [parameter.tensor for parameter in bucket]
            for bucket in plan_buckets(ready_order, Fusion(bucket_mb=config.bucket_mb))
        ]
        by_gradients = config.aggregation == "gradients"
        self.gradients = GradientAggregation(buckets, transport, config.compression) if by_gradients else None
        codec = "none" if by_gradients else config.compression
        self.replicas = ReplicatedTensors(buckets, transport, codec)
        self._delta, self._transport = config.delta, transport
        self._norm: SquaredNorm | None = None
        self._change = math.inf
        self._flags: Handle[list[int]] | None = None
        self.flag_sent = False
        self.decision: Decision | None = None
        self.guard = StepGuard(optimizer, "SelSync")
        self._steps_in_a_row, self._largest_change = 0, 0.0

    @property
    def measured(self) -> bool:
        """Whether this step's gradient has been measured."""
        return self._norm is not None

    def measure(self) -> None:
        """Starts to measure the gradient, in one pass."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        self._some_missing = len(gradients) < len(self.parameters)
        self._norm = SquaredNorm(gradients)
        self.decision = None

    def send_flag(self) -> None:
        """Takes the measurement, and tells the other ranks whether this rank calls for a synchronised step."""
        assert self._norm is not None
        squared_norm = self._norm.item()
        self._change = self.tracker.update(squared_norm)
        self.flag_sent = True
        if math.isinf(self._delta):  # no step is ever synchronised: there is nothing to tell
            return
        flag = SYNCHRONISE * (self._change >= self._delta)
        flag |= MISSING_GRADIENT * self._some_missing
        flag |= NOT_FINITE * (not math.isfinite(squared_norm))
        self._flags = self._transport.exchange_flags(flag)

    def decide(self) -> Decision:
        """Waits for the flags of all ranks."""
        union = 0
        for flag in self._flags.wait() if self._flags else []:
            union |= flag
        self.decision = Decision(
            self._change,
            synchronised=bool(union & SYNCHRONISE),
            missing_gradient=bool(union & MISSING_GRADIENT),
            not_finite=bool(union & NOT_FINITE),
        )
        return self.decision

    def finish_step(self) -> None:
        """Gets ready for the next step."""
        self._norm = self._flags = None
        self.flag_sent = False
        self._watch_local_steps()

    def _watch_local_steps(self) -> None:
        """Says once if delta seems to be out of reach."""
        if self.decision is None or self.decision.synchronised or math.isinf(self._delta):
            self._steps_in_a_row, self._largest_change = 0, 0.0
            return
        self._steps_in_a_row += 1
        self._largest_change = max(self._largest_change, self._change)
        if self._steps_in_a_row == MANY_LOCAL_STEPS and self._transport.rank == 0:
            warnings.warn(
                f"SelSync has taken {MANY_LOCAL_STEPS} local steps in a row. The gradient of rank 0 changed by at most "
                f"{self._largest_change:.3g}, and delta={self._delta:g}. If this is not intended, choose a smaller "
                "delta or a larger smoothing.",
                stacklevel=4,
            )
