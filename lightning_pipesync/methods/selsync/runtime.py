"""SelSync in a training loop (SelSync, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.methods.replicas.gradient_change import SyncDecision
from lightning_pipesync.methods.replicas.method import ReplicaMethod
from lightning_pipesync.methods.replicas.trigger import GradientTrigger
from lightning_pipesync.methods.selsync.config import SelSyncConfig
from lightning_pipesync.methods.selsync.gradient_averaging import GradientAveraging
from lightning_pipesync.methods.selsync.lab import SelSyncLab


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

    Attributes:
        num_local_steps: number of local steps so far.
        num_synchronized_steps: number of synchronized steps so far.
    """

    name = "selsync"
    config_type = SelSyncConfig
    lab = SelSyncLab
    shown_metrics = ("lssr", "relative_gradient_change", "mib_sent")

    config: SelSyncConfig

    def _attach(self, parameters: Sequence[NamedParameter]) -> None:
        super()._attach(parameters)
        self._stepped = 0  # index of the last optimizer that has taken a step
        self.num_local_steps = self.num_synchronized_steps = 0

    def _policy(self, optimizer: Optimizer, parameters: Sequence[NamedParameter]) -> GradientTrigger:
        name = type(optimizer).__name__
        if self.config.aggregation == "gradients":
            return GradientAveraging(parameters, self.config, name, self.transport)
        return GradientTrigger([parameter.tensor for parameter in parameters], self.config, name, self.transport)

    def _ordered(self, parameters: list[NamedParameter]) -> list[NamedParameter]:
        return parameters[::-1]  # that in which gradients become ready

    @property
    def last(self) -> SyncDecision:
        """The decision about the last step."""
        return self._trigger.last

    @property
    def lssr(self) -> float:
        """Local-to-synchronous step ratio (Eq. 4): the share of local steps."""
        steps = self.num_local_steps + self.num_synchronized_steps
        return self.num_local_steps / steps if steps else 0.0

    @property
    def delta(self) -> float:
        """The threshold on the relative gradient change; set it on all ranks alike, between two steps."""
        return self._trigger.algorithm.threshold.delta

    @delta.setter
    def delta(self, delta: float) -> None:
        if not delta >= 0:
            raise ValueError(f"delta must be at least 0, got {delta!r}.")
        for trigger in self._triggers:
            trigger.algorithm.threshold.delta = delta

    @property
    def _triggers(self) -> list[GradientTrigger]:
        return [unit.policy for unit in self._units if isinstance(unit.policy, GradientTrigger)]

    @property
    def _trigger(self) -> GradientTrigger:
        """That of the last optimizer that has taken a step."""
        return self._triggers[self._stepped]

    def _end_step(self, index: int) -> bool:
        synchronized = super()._end_step(index)
        self._stepped = index
        self.num_synchronized_steps += synchronized
        self.num_local_steps += not synchronized
        return synchronized

    def metrics(self) -> dict[str, float]:
        """Returns LSSR, delta, this rank's relative gradient change, MiB sent and seconds of exposed communication."""
        return {
            "lssr": self.lssr,
            "relative_gradient_change": self.last.relative_change,
            "delta": self.delta,
            **super().metrics(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's replica, optimizer state, trackers, thresholds, counters and codec residuals."""
        return {**super().state_dict(), "steps": [self.num_local_steps, self.num_synchronized_steps]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from what :meth:`state_dict` returned on this rank, after the consolidated weights were loaded.

        Raises:
            ValueError: the state is of other settings of compression, error feedback, aggregation, outer step or
                bucket size.
        """
        super().load_state_dict({**state, "units": [_present(unit) for unit in state["units"]]})
        self.num_local_steps, self.num_synchronized_steps = state["steps"]

    def _shape_settings(self) -> dict[str, Any]:
        config = self.config
        return {
            "compression": str(config.compression),
            "error_feedback": config.uses_error_feedback,
            "aggregation": config.aggregation,
            "bucket_mb": config.bucket_mb,
            "outer_lr": config.outer_lr,
            "outer_momentum": [config.outer_momentum_of(optimizer) for optimizer in self.optimizers],
        }


def _present(unit: dict[str, Any]) -> dict[str, Any]:
    """Returns the state of an optimizer's unit, which may be in the form of earlier versions, in the present one."""
    if "fragments" in unit:
        return unit
    return {
        **unit,
        "fragments": {"replicas": unit["replicas"], "flights": {}},
        "trigger": {**unit["trigger"], "gradients": unit["gradients"]},
        "steps": [0, 0],
        "started": 0,
    }
