"""Selective synchronization of the parameters of one optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from lightning_pipesync.core.buckets import Fusion, plan_buckets
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.methods.gradients.bucket import GradientBuckets
from lightning_pipesync.methods.replicas.tensors import ReplicatedTensors
from lightning_pipesync.methods.replicas.trigger import GradientTrigger
from lightning_pipesync.methods.selsync.config import SelSyncConfig


class OptimizerSync:
    """Decides by the gradient of one optimizer, and averages its parameters or their gradients.

    Args:
        optimizer: the user's own.
        parameters: those of its parameters that no earlier optimizer has.
        config: the settings.
        transport: the way to the other ranks.

    Attributes:
        optimizer: the user's own.
        trigger: decides which steps are synchronized.
        replicas: averages the parameters.
        gradients: averages the gradients; None with ``aggregation="parameters"``.
        states_diverged: whether the optimizers' states may differ between ranks: from the first local step on.
    """

    def __init__(
        self, optimizer: Optimizer, parameters: Sequence[NamedParameter], config: SelSyncConfig, transport: Transport
    ) -> None:
        self.optimizer = optimizer
        self.states_diverged = False
        tensors = [parameter.tensor for parameter in parameters]
        self.trigger = GradientTrigger(tensors, config, type(optimizer).__name__, transport)
        ready_order = parameters[::-1]
        buckets = [
            [parameter.tensor for parameter in bucket]
            for bucket in plan_buckets(ready_order, Fusion(bucket_mb=config.bucket_mb))
        ]
        by_gradients = config.aggregation == "gradients"
        codec, feedback = ("none", False) if by_gradients else (config.compression, config.uses_error_feedback)
        self.replicas = ReplicatedTensors(buckets, transport, codec, feedback, config.outer_step(optimizer))
        self.gradients: GradientBuckets | None = None
        if by_gradients:
            self.gradients = GradientBuckets(buckets, transport, config.compression, config.uses_error_feedback)

    def took_local_step(self) -> None:
        """Notes that this rank's weights and its optimizer's state have been updated by its own gradient."""
        self.replicas.diverged = self.states_diverged = True

    def applied_averaged_gradient(self) -> None:
        """Notes that all ranks have applied the same gradient, with the state of their own optimizers."""
        self.replicas.diverged |= self.states_diverged

    def check_consolidation(self) -> None:
        """Checks that all ranks are about to consolidate the weights, and have skipped the same steps.

        Raises:
            RuntimeError: they differ; or a peer is lost.
        """
        self.trigger.check_consolidation()

    def state_dict(self) -> dict[str, Any]:
        """Returns optimizer state, tracker, threshold, this rank's replica and the codec's residuals."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "states_diverged": self.states_diverged,
            "trigger": self.trigger.state_dict(),
            "replicas": self.replicas.state_dict(),
            "gradients": self.gradients.state_dict() if self.gradients else {},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from what :meth:`state_dict` returned on this rank."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.states_diverged = state.get("states_diverged", True)  # not in checkpoints of earlier versions
        self.trigger.load_state_dict(state["trigger"])
        self.replicas.load_state_dict(state["replicas"])
        if self.gradients:
            self.gradients.load_state_dict(state["gradients"])
