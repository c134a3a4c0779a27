"""SelSync in a training loop (SelSync, Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch.optim import Optimizer

from lightning_pipesync.core.buckets import Fusion, plan_buckets
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.methods.gradients.bucket import GradientBuckets
from lightning_pipesync.methods.gradients.low_rank import low_rank_gradients
from lightning_pipesync.methods.method import NETWORK_METRICS, MetricInfo, counted
from lightning_pipesync.methods.replicas.gradient_change import SyncDecision
from lightning_pipesync.methods.replicas.method import ReplicaMethod
from lightning_pipesync.methods.replicas.settings import ReplicaSettings
from lightning_pipesync.methods.replicas.trigger import GradientTrigger
from lightning_pipesync.methods.selsync.config import SelSyncConfig


class GradientAveraging(GradientTrigger):
    """A trigger at whose synchronized steps the gradients are averaged before the update (Section III-C)."""

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


class SelSync(ReplicaMethod):
    """Local steps, synchronized only when some rank's gradient changes by more than delta.

    Every rank trains a replica with an optimizer of its own. At each step it compares the norm of its gradient with
    that of earlier steps, and sends a flag of one byte: whether the relative change is at least ``delta``. If it is on
    any rank, all ranks average their parameters after the update, or with ``aggregation="gradients"`` their gradients
    before it. They also average floating-point buffers that changed, and copy other buffers from rank 0. A local step
    sends the flag only. Optimizer state is never averaged, as in the paper.

    A plain loop::

        sync = SelSync(model, optimizer, delta=0.3)     # all ranks now have rank 0's weights
        loader = sync.prepare_train_loader(loader)      # in the order of SelDP; with injection, if it is set
        for epoch in range(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                loss(model(x), y).backward()
                sync.step()                             # in place of optimizer.step()
            sync.flush()                                # the weights are the average of the replicas
            validate(model)
            sync.resume()                               # each rank's replica again
        sync.flush()
        sync.detach()

    With ``overlap="forward"`` the average of a synchronized step runs under the next forward pass. Then call
    ``sync.synchronize()`` before anything but that, a ``state_dict`` or :meth:`flush` reads or changes this rank's
    weights.

    Arguments, errors and further calls are those of :class:`SyncMethod`; the settings are in :class:`SelSyncConfig`.

    All ranks may skip a step whose gradient was measured, and continue with the next backward pass: the measurement is
    undone. If they accumulate into the gradient instead, the sum is measured.
    """

    name = "selsync"
    config_type = SelSyncConfig
    metric_infos = MappingProxyType(
        {
            "lssr": MetricInfo("share of the steps so far that stayed local (Eq. 4)", over_ranks="same"),
            "synchronized_steps": MetricInfo("steps so far that were synchronized", over_ranks="same"),
            "relative_gradient_change": MetricInfo("that of the last step (Eq. 2)", over_ranks="max"),
            "delta": MetricInfo("threshold of the next step", over_ranks="same"),
            "lr_scale": MetricInfo("factor on the learning rate of the last step's optimizer"),
            **NETWORK_METRICS,
        }
    )
    shown_metrics = MappingProxyType({"lssr": "lssr", "mib_sent": "sent_MiB"})

    config: SelSyncConfig

    _stepped = 0  # index of the last optimizer that has taken a step

    def _policy(self, optimizer: Optimizer, parameters: Sequence[NamedParameter]) -> GradientTrigger:
        trigger = GradientAveraging if self.config.aggregation == "gradients" else GradientTrigger
        return trigger(optimizer, parameters, self.config, self.transport)

    def _ordered(self, parameters: list[NamedParameter]) -> list[NamedParameter]:
        return parameters[::-1]  # that in which gradients become ready

    @property
    def last(self) -> SyncDecision:
        """The decision about the last step."""
        return self._trigger.last

    @property
    def num_local_steps(self) -> int:
        """Number of local steps so far, of all optimizers."""
        return sum(replica.num_local_steps for replica in self._replicas)

    @property
    def num_synchronized_steps(self) -> int:
        """Number of synchronized steps so far, of all optimizers."""
        return sum(replica.num_steps - replica.num_local_steps for replica in self._replicas)

    @property
    def lssr(self) -> float:
        """Local-to-synchronous step ratio (Eq. 4): the share of local steps."""
        steps = self.num_local_steps + self.num_synchronized_steps
        return self.num_local_steps / steps if steps else 0.0

    @property
    def delta(self) -> float:
        """The threshold on the relative gradient change; set it on all ranks alike, between two steps.

        Raises:
            ValueError: what is set is negative, or ranks send no flags, as they began with ``delta=inf``.
        """
        return self._trigger.threshold.delta

    @delta.setter
    def delta(self, delta: float) -> None:
        if not delta >= 0:
            raise ValueError(f"delta must be at least 0, got {delta!r}.")
        if self.config.is_local and delta != math.inf:
            raise ValueError(
                f"delta={delta!r} has no effect: SelSync was attached with delta=inf, with which ranks send no flags. "
                "To set delta later, attach SelSync with a large one, such as 1e9."
            )
        for trigger in self._triggers:
            trigger.threshold.delta = delta

    @property
    def _triggers(self) -> list[GradientTrigger]:
        return [replica.policy for replica in self._replicas if isinstance(replica.policy, GradientTrigger)]

    @property
    def _trigger(self) -> GradientTrigger:
        """That of the last optimizer that has taken a step."""
        return self._triggers[self._stepped]

    def _end_step(self, index: int) -> None:
        self._stepped = index
        super()._end_step(index)

    def metrics(self) -> dict[str, float]:
        return {
            "lssr": self.lssr,
            "synchronized_steps": self.num_synchronized_steps,
            "relative_gradient_change": self.last.relative_change,
            "delta": self.delta,
            "lr_scale": self._replicas[self._stepped].lr_scale,
            **super().metrics(),
        }

    def summary(self, num_steps: int, before: Mapping[str, float]) -> str:
        synchronized = self.num_synchronized_steps - before["synchronized_steps"]
        return f"{1 - synchronized / num_steps:.0%} of {counted(num_steps, 'step')} were local"

    def _shape_settings(self) -> dict[str, Any]:
        return {
            **super()._shape_settings(),
            "aggregation": self.config.aggregation,
            "outer_lr": self.config.outer_lr,
            "outer_momentum": self.config.outer_momentum,
            **self.config.low_rank_settings,
        }
