"""Gradient aggregation: a synchronized step averages the gradients before the update (SelSync, Section III-C)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from lightning_pipesync.core.buckets import Fusion, plan_buckets
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.methods.gradients.bucket import GradientBuckets
from lightning_pipesync.methods.gradients.low_rank import low_rank_gradients
from lightning_pipesync.methods.replicas.settings import ReplicaSettings
from lightning_pipesync.methods.replicas.trigger import GradientTrigger


class GradientAveraging(GradientTrigger):
    """A trigger at whose synchronized steps the gradients are averaged."""

    averages_gradients = True

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[NamedParameter],
        settings: ReplicaSettings,
        transport: Transport,
    ) -> None:
        super().__init__(optimizer, parameters, settings, transport)
        plan = plan_buckets(parameters, Fusion(bucket_mb=settings.bucket_mb))
        buckets = [[parameter.tensor for parameter in bucket] for bucket in plan]
        low_rank = low_rank_gradients(parameters, settings)
        codec, feedback = settings.compression, settings.uses_error_feedback
        self._gradients = GradientBuckets(buckets, transport, codec, feedback, low_rank)

    def complete_gradient(self) -> bool:
        """Measures the gradient, and averages it if the step is synchronized.

        Returns:
            Whether it was averaged with one that is not finite.

        Raises:
            RuntimeError: some rank has skipped a step that another one has taken; or a peer is lost.
        """
        super().complete_gradient()
        decision = self.decide()
        if decision.synchronized:
            self._gradients.average(decision.missing_gradient)
        return decision.synchronized and decision.not_finite

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "gradients": self._gradients.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._gradients.load_state_dict(state["gradients"])
