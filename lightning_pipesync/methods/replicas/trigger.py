"""Decides by the gradients of an optimizer which steps the ranks synchronize."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from lightning_pipesync.core.comm.handle import Handle
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.parameters import NamedParameter, SquaredNorm, norm_of_gradients
from lightning_pipesync.core.profiling import profiled
from lightning_pipesync.methods.replicas.flags import exchange_flags
from lightning_pipesync.methods.replicas.gradient_change import SelectiveSync, SyncDecision
from lightning_pipesync.methods.replicas.policy import AveragingPolicy
from lightning_pipesync.methods.replicas.settings import ReplicaSettings

#: After so many consecutive local steps a warning says that delta seems too large.
MANY_LOCAL_STEPS = 500


class GradientTrigger(AveragingPolicy):
    """Exchanges the flags of an optimizer's gradient, by which all ranks take the same decision (Algorithm 1).

    ``last`` is the decision about the last step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[NamedParameter],
        settings: ReplicaSettings,
        transport: Transport,
    ) -> None:
        self.algorithm = SelectiveSync(settings, type(optimizer).__name__)
        self.last = SyncDecision(delta=self.algorithm.threshold.delta)
        self._parameters = [parameter.tensor for parameter in parameters]
        self._settings, self._transport = settings, transport
        self._norm: SquaredNorm | None = None
        self._some_missing = False
        self._flags: Handle[list[int]] | None = None  # of this step, once this rank has sent its own
        self._steps_in_a_row, self._largest_change = 0, 0.0

    def may_start(self, step: int) -> bool:
        return not self.algorithm.is_local

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
        """Waits for the flags of all ranks, and decides whether the step is synchronized; once in a step."""
        return self.algorithm.decision or self.algorithm.decide(self._exchange().wait())

    def end_step(self, step: int) -> int:
        self.last = self.decide()
        self.algorithm.finish_step()
        self._norm = self._flags = None
        self._count_local_steps()
        return int(self.last.synchronized)

    def skip_step(self) -> None:
        """Ends a skipped step, if its gradient was measured: each measured gradient has a flag, so that all know."""
        if self._norm is not None:
            self.algorithm.skip_step(self._exchange(skipping=True).wait())
            self._norm = self._flags = None

    def check_consolidation(self) -> None:
        """Checks that all ranks are about to consolidate the weights, and have skipped the same steps."""
        if not self.algorithm.is_local:
            flag = self.algorithm.consolidation_flag(skipping=self._norm is not None)
            self.algorithm.check(exchange_flags(self._transport, flag))

    def state_dict(self) -> dict[str, Any]:
        return {
            "tracker": self.algorithm.tracker.state_dict(),
            "threshold": self.algorithm.threshold.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "tracker" not in state:
            return  # it is a clock's
        self.algorithm.tracker.load_state_dict(state["tracker"])
        self.algorithm.threshold.load_state_dict(state["threshold"])

    def _exchange(self, skipping: bool = False) -> Handle[list[int]]:
        """Waits for the norm, and sends this rank's flag, once in a step; ``skipping``: the user has skipped it."""
        if self._flags is None:
            assert self._norm is not None
            squared_norm = self._transport.sum_over_shards(self._norm.item())
            flag = self.algorithm.measure(squared_norm, self._some_missing, skipping)
            # If no step is ever synchronized, ranks send nothing.
            self._flags = Handle(list) if self.algorithm.is_local else self._transport.exchange_flags(flag)
        return self._flags

    def _count_local_steps(self) -> None:
        """Warns once if the constant delta seems too large."""
        if self.last.synchronized or self._settings.delta == "auto" or self.algorithm.is_local:
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
