"""Selective synchronization (SelSync, Algorithm 1): gradients decide which steps the ranks synchronize.

One rank does in a step::

    flag = measure(squared norm of the gradient)    # lines 7, 8, 11 and 12
    flags = all_gather(flag)                        # line 14
    if some flag says so:                           # line 15
        average the parameters                      # lines 16 and 17
"""

from __future__ import annotations

import functools
import math
import operator
import warnings
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from lightning_pipesync.core.comm.handle import Handle
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.parameters import NamedParameter, SquaredNorm, norm_of_gradients
from lightning_pipesync.core.profiling import profiled
from lightning_pipesync.methods.replicas.flags import (
    CONSOLIDATE,
    MISSING_GRADIENT,
    NOT_FINITE,
    SKIPPED,
    SYNCHRONIZE,
    UNDEFINED,
    check_same,
    exchange_flags,
)
from lightning_pipesync.methods.replicas.gradient_change import GradientChangeTracker, SyncDecision, Threshold
from lightning_pipesync.methods.replicas.policy import AveragingPolicy
from lightning_pipesync.methods.replicas.rate_factor import RateFactor
from lightning_pipesync.methods.replicas.settings import ReplicaSettings

#: After so many consecutive local steps a warning says that delta seems too large.
MANY_LOCAL_STEPS = 500


class GradientTrigger(AveragingPolicy):
    """Exchanges the flags of an optimizer's gradient, by which all ranks take the same decision.

    Attributes:
        last: the decision about the last step.
        is_local: whether no step is ever synchronized; then ranks send nothing.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[NamedParameter],
        settings: ReplicaSettings,
        transport: Transport,
    ) -> None:
        self.tracker, self.threshold = GradientChangeTracker(settings.window, settings.smoothing), Threshold(settings)
        self.last = SyncDecision(delta=self.threshold.delta)
        self.is_local = settings.delta == math.inf
        self._factor = RateFactor(optimizer if settings.follow_lr else None)
        self._optimizer = type(optimizer).__name__
        self._parameters = [parameter.tensor for parameter in parameters]
        self._settings, self._transport = settings, transport
        self._num_skipped = 0
        # Of this step: the norm, once the gradient is complete; the flags, once this rank has sent its own.
        self._norm: SquaredNorm | None = None
        self._some_missing, self._change = False, math.inf
        self._flags: Handle[list[int]] | None = None
        self._decision: SyncDecision | None = None
        self._steps_in_a_row, self._largest_change = 0, 0.0

    def may_start(self, step: int) -> bool:
        return not self.is_local

    def complete_gradient(self) -> bool:
        """Starts to compute the norm of the gradient, in one pass; sends the flag, except on CUDA.

        There the host would wait for the backward pass, so that it enqueues the update first.
        """
        with profiled("trigger"):
            present = [parameter for parameter in self._parameters if parameter.grad is not None]
            self._some_missing = len(present) < len(self._parameters)
            self._norm, self._flags = norm_of_gradients(present), None
            if self._transport.device.type != "cuda":
                self._exchange()
        return False

    def decide(self) -> SyncDecision:
        """Waits for the flags of all ranks, and decides whether the step is synchronized (line 15)."""
        if self._decision is None:
            flags = self._exchange().wait()
            self._check(flags)
            union = functools.reduce(operator.or_, flags, 0)
            self._decision = SyncDecision(
                self._change,
                self.threshold.delta,
                synchronized=bool(union & SYNCHRONIZE),
                missing_gradient=bool(union & MISSING_GRADIENT),
                not_finite=bool(union & NOT_FINITE),
                undefined=bool(union & UNDEFINED),
            )
        return self._decision

    def end_step(self, step: int) -> int:
        """See :meth:`AveragingPolicy.end_step`; updates delta, unless the change of some rank was not defined."""
        self.last = self.decide()
        factor = self._factor.now()
        if not self.last.undefined:
            self.threshold.update(self.last.synchronized, factor)
        self._norm = self._flags = self._decision = None
        self._count_local_steps()
        return int(self.last.synchronized)

    def skip_step(self) -> None:
        """Ends a skipped step, if its gradient was measured: each measured gradient has a flag, so that all know."""
        if self._norm is not None:
            self._check(self._exchange(skipping=True).wait())
            self.tracker.undo()
            self._num_skipped += 1
            self._norm = self._flags = self._decision = None

    def check_consolidation(self) -> None:
        """Checks that all ranks are about to consolidate the weights, and have skipped the same steps."""
        if not self.is_local:
            self._check(exchange_flags(self._transport, self._skipped(self._norm is not None) | CONSOLIDATE))

    def state_dict(self) -> dict[str, Any]:
        return {
            "tracker": self.tracker.state_dict(),
            "threshold": self.threshold.state_dict(),
            "largest_lr": self._factor.largest,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "tracker" in state:  # otherwise it is a clock's
            self.tracker.load_state_dict(state["tracker"])
            self.threshold.load_state_dict(state["threshold"])
            self._factor.largest = state["largest_lr"]

    def _exchange(self, skipping: bool = False) -> Handle[list[int]]:
        """Waits for the norm, and sends this rank's flag, once in a step; ``skipping``: the user has skipped it."""
        if self._flags is None:
            assert self._norm is not None
            squared_norm = self._transport.sum_over_shards(self._norm.item())
            self._change = self.tracker.update(squared_norm)  # line 8
            flag = SYNCHRONIZE * (self._change >= self.threshold.delta and not self.is_local)  # lines 11 and 12
            flag |= UNDEFINED * math.isinf(self._change)
            flag |= MISSING_GRADIENT * self._some_missing
            flag |= NOT_FINITE * (not math.isfinite(squared_norm))
            flag |= self._skipped(skipping)
            self._flags = Handle(list) if self.is_local else self._transport.exchange_flags(flag)
        return self._flags

    def _skipped(self, skipping: bool) -> int:
        return SKIPPED[(self._num_skipped + skipping) % 2]

    def _check(self, flags: Sequence[int]) -> None:
        """Raises a RuntimeError unless all ranks consolidate or none, and all have skipped the same steps."""
        check_same(
            flags,
            f"have not skipped the same steps of {self._optimizer}. Once its gradient has been measured, by clipping "
            "it or by reduce(), all ranks take the step, or none: decide by what is the same on all ranks; for a step "
            "that changes nothing, set the gradients to zero.",
            mask=sum(SKIPPED),
        )

    def _count_local_steps(self) -> None:
        """Warns once if the constant delta seems too large."""
        if self.last.synchronized or self._settings.delta == "auto" or self.is_local:
            self._steps_in_a_row, self._largest_change = 0, 0.0
            return
        self._steps_in_a_row += 1
        self._largest_change = max(self._largest_change, self.last.relative_change)
        if self._steps_in_a_row == MANY_LOCAL_STEPS and self._transport.rank == 0:
            warnings.warn(
                f"{MANY_LOCAL_STEPS} local steps in a row. The gradient of rank 0 changed by at most "
                f"{self._largest_change:.3g}, and delta={self.last.delta:g}. If this is not intended, choose a smaller "
                "delta or delta='auto'.",
                stacklevel=5,
            )
