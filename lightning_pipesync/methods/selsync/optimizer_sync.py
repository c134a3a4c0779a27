"""Selective synchronization of the parameters of one optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from lightning_pipesync.core.buckets import Fusion, plan_buckets
from lightning_pipesync.core.handle import Handle
from lightning_pipesync.core.norm import SquaredNorm
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.core.transport import Transport
from lightning_pipesync.methods.replicas.gradients import GradientAggregation
from lightning_pipesync.methods.replicas.tensors import ReplicatedTensors
from lightning_pipesync.methods.selsync.algorithm import Decision, SelectiveSync
from lightning_pipesync.methods.selsync.config import SelSyncConfig

#: After so many consecutive local steps a warning says that delta seems too large.
MANY_LOCAL_STEPS = 500


class OptimizerSync:
    """Exchanges the flags of one optimizer's gradient, and averages its parameters or their gradients.

    Args:
        optimizer: the user's own.
        parameters: those of its parameters that no earlier optimizer has.
        config: the settings.
        transport: the way to the other ranks.

    Attributes:
        parameters: their tensors.
        algorithm: decides which steps are synchronized.
        replicas: averages the parameters.
        gradients: averages the gradients; None with ``aggregation="parameters"``.
        flag_sent: whether this rank has sent the flag of this step.
    """

    def __init__(
        self, optimizer: Optimizer, parameters: Sequence[NamedParameter], config: SelSyncConfig, transport: Transport
    ) -> None:
        self.optimizer = optimizer
        self.parameters = [parameter.tensor for parameter in parameters]
        self.algorithm = SelectiveSync(config, type(optimizer).__name__)
        ready_order = parameters[::-1]
        buckets = [
            [parameter.tensor for parameter in bucket]
            for bucket in plan_buckets(ready_order, Fusion(bucket_mb=config.bucket_mb))
        ]
        by_gradients = config.aggregation == "gradients"
        codec, feedback = ("none", False) if by_gradients else (config.compression, config.uses_error_feedback)
        self.replicas = ReplicatedTensors(buckets, transport, codec, feedback, config.outer_step(optimizer))
        self.gradients: GradientAggregation | None = None
        if by_gradients:
            self.gradients = GradientAggregation(buckets, transport, config.compression, config.uses_error_feedback)
        self.flag_sent = False
        self._config, self._transport = config, transport
        self._norm: SquaredNorm | None = None
        self._some_missing = False
        self._flags: Handle[list[int]] | None = None
        self._steps_in_a_row, self._largest_change = 0, 0.0

    def measure(self) -> None:
        """Starts to compute the norm of the gradient, in one pass."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        self._some_missing = len(gradients) < len(self.parameters)
        self._norm = SquaredNorm(gradients)

    def send_flag(self, skipping: bool = False) -> None:
        """Waits for the norm, and sends this rank's flag.

        Args:
            skipping: whether the user has skipped the step.
        """
        assert self._norm is not None
        flag = self.algorithm.measure(self._norm.item(), self._some_missing, skipping)
        self.flag_sent = True
        if not self._config.is_local:  # otherwise no step is ever synchronized
            self._flags = self._transport.exchange_flags(flag)

    def decide(self) -> Decision:
        """Waits for the flags of all ranks, and decides whether the step is synchronized; once in a step.

        Raises:
            RuntimeError: some rank has skipped a step that another one has taken; or a peer is lost.
        """
        return self.algorithm.decision or self.algorithm.decide(self._receive_flags())

    def finish_step(self) -> None:
        """Ends a step that was taken."""
        decision = self.decide()
        self.algorithm.finish_step()
        self._reset()
        self._count_local_steps(decision)

    def skip_step(self) -> None:
        """Ends a step that the user has skipped; does nothing if its gradient was not measured.

        All ranks skip it, or none. Every measured gradient has a flag, which reveals a rank that does otherwise.

        Raises:
            RuntimeError: another rank has not skipped it; or a peer is lost.
        """
        if self._norm is None:
            return
        if not self.flag_sent:
            self.send_flag(skipping=True)
        self.algorithm.skip_step(self._receive_flags())
        self._reset()

    def check_consolidation(self) -> None:
        """Checks that all ranks are about to consolidate the weights, and have skipped the same steps.

        Raises:
            RuntimeError: they differ; or a peer is lost.
        """
        if not self._config.is_local:
            flag = self.algorithm.consolidation_flag(skipping=self._norm is not None)
            self.algorithm.check(self._transport.exchange_flags(flag).wait())

    def state_dict(self) -> dict[str, Any]:
        """Returns optimizer state, tracker, threshold, this rank's replica and the codec's residuals."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "tracker": self.algorithm.tracker.state_dict(),
            "threshold": self.algorithm.threshold.state_dict(),
            "replicas": self.replicas.state_dict(),
            "gradients": self.gradients.state_dict() if self.gradients else {},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from what :meth:`state_dict` returned on this rank."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.algorithm.tracker.load_state_dict(state["tracker"])
        self.algorithm.threshold.load_state_dict(state["threshold"])
        self.replicas.load_state_dict(state["replicas"])
        if self.gradients:
            self.gradients.load_state_dict(state["gradients"])

    def _reset(self) -> None:
        self._norm = self._flags = None
        self.flag_sent = False

    def _receive_flags(self) -> list[int]:
        return self._flags.wait() if self._flags else []

    def _count_local_steps(self, decision: Decision) -> None:
        """Warns once if the constant delta seems too large."""
        if decision.synchronized or self._config.delta == "auto" or self._config.is_local:
            self._steps_in_a_row, self._largest_change = 0, 0.0
            return
        self._steps_in_a_row += 1
        self._largest_change = max(self._largest_change, decision.relative_change)
        if self._steps_in_a_row == MANY_LOCAL_STEPS and self._transport.rank == 0:
            warnings.warn(
                f"SelSync has taken {MANY_LOCAL_STEPS} local steps in a row. The gradient of rank 0 changed by at most "
                f"{self._largest_change:.3g}, and delta={decision.delta:g}. If this is not intended, choose a smaller "
                "delta or delta='auto'.",
                stacklevel=4,
            )
