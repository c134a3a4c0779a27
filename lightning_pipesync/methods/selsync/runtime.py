"""SelSync in a training loop (SelSync, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.core.torch_private import is_compiled
from lightning_pipesync.methods.replicas.gradient_change import SyncDecision
from lightning_pipesync.methods.replicas.method import ReplicaMethod
from lightning_pipesync.methods.replicas.overlap import ForwardOverlap
from lightning_pipesync.methods.selsync.config import SelSyncConfig
from lightning_pipesync.methods.selsync.lab import SelSyncLab
from lightning_pipesync.methods.selsync.optimizer_sync import OptimizerSync

T = TypeVar("T")


class SelSync(ReplicaMethod):
    """Local steps, synchronized only when some rank's gradient changes by more than delta.

    Every rank trains its own replica with its own optimizer. At each step it compares the norm of its gradient with
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
            sync.resume()                               # each rank's own replica again
        sync.flush()
        sync.detach()

    With ``overlap="forward"`` the average of a synchronized step runs under the next forward pass. Then call
    ``sync.synchronize()`` before anything but that, a ``state_dict`` or :meth:`flush` reads or changes this rank's own
    weights.

    Arguments, errors and further calls are those of :class:`SyncMethod`; the settings are in :class:`SelSyncConfig`.

    All ranks may skip a step whose gradient was measured, and continue with the next backward pass: the measurement is
    undone. If they accumulate into the gradient instead, the sum is measured.

    Attributes:
        last: the decision about the last step.
        num_local_steps: number of local steps so far.
        num_synchronized_steps: number of synchronized steps so far.
    """

    name = "selsync"
    config_type = SelSyncConfig
    lab = SelSyncLab
    shown_metrics = ("lssr", "relative_gradient_change", "mib_sent")

    config: SelSyncConfig

    def _attach(self, parameters: Sequence[NamedParameter]) -> None:
        self._optimizer_syncs = [
            OptimizerSync(opt, [p for p in parameters if p.group and p.group[0] == i], self.config, self.transport)
            for i, opt in enumerate(self.optimizers)
        ]
        overlaps = self.config.overlaps and self.transport.world_size > 1 and not is_compiled(self._module)
        self._overlap = ForwardOverlap(self._module, self._replicas, self.transport) if overlaps else None
        self._stepped = self._optimizer_syncs[0]
        self._attach_replicas(parameters)
        self.last = SyncDecision(delta=self.delta)
        self.num_local_steps = 0
        self.num_synchronized_steps = 0

    @property
    def lssr(self) -> float:
        """Local-to-synchronous step ratio (Eq. 4): the share of local steps."""
        steps = self.num_local_steps + self.num_synchronized_steps
        return self.num_local_steps / steps if steps else 0.0

    @property
    def delta(self) -> float:
        """The threshold on the relative gradient change; set it on all ranks alike, between two steps."""
        return self._stepped.trigger.algorithm.threshold.delta

    @delta.setter
    def delta(self, delta: float) -> None:
        if not delta >= 0:
            raise ValueError(f"delta must be at least 0, got {delta!r}.")
        for sync in self._optimizer_syncs:
            sync.trigger.algorithm.threshold.delta = delta

    @property
    def _units(self) -> list[OptimizerSync]:
        return self._optimizer_syncs

    def _complete(self, index: int, loss_scale: float | None) -> bool:
        """Measures the gradient, which is unscaled and not yet clipped; with gradient aggregation, averages it.

        Returns:
            Whether the gradient was averaged with one that is not finite.

        Raises:
            RuntimeError: some rank has skipped a step that another one has taken; or a peer is lost.
        """
        self.synchronize()  # before the update, also of weights that the last forward pass did not need
        sync = self._optimizer_syncs[index]
        sync.trigger.measure()
        if sync.gradients is None or not (decision := sync.trigger.decide()).synchronized:
            return False
        sync.gradients.average(decision.missing_gradient)
        return decision.not_finite

    def _skip(self, index: int) -> None:
        self._optimizer_syncs[index].trigger.skip_step()

    def _step(self, index: int, update: Callable[[], T] | None) -> T | None:
        """Updates this rank's weights, and starts to average those of all ranks if the step is synchronized.

        Raises:
            RuntimeError: ``update`` was given and did not call :meth:`reduce` after the last backward pass;
                some rank has skipped a step that another one has taken; or a peer is lost.
        """
        sync = self._optimizer_syncs[index]
        result = self.user_steps.update_own(index, update)  # Algorithm 1, line 9
        decision = sync.trigger.decide()
        if decision.synchronized:
            self.synchronize()  # another optimizer's averages: one thread at a time issues collectives
            self._non_trainable.average()
            if sync.gradients is None:
                self._average(index)  # Algorithm 1, lines 16 and 17
            else:
                sync.applied_averaged_gradient()
            self.num_synchronized_steps += 1
        else:
            self.num_local_steps += 1
            sync.took_local_step()
        self._followers_diverged |= any(replicas.diverged for replicas in self._replicas)
        sync.trigger.finish_step()
        self._stepped, self.last = sync, decision
        if self._overlap:
            self._overlap.end_step()
        if self._waits:
            self.synchronize()
        return result

    def synchronize(self) -> None:
        """Waits for the average of the last step, if it was synchronized; not a collective call.

        Raises:
            RuntimeError: a peer is lost.
        """
        if self._overlap:
            self._overlap.wait()

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
        super().load_state_dict(state)
        self.num_local_steps, self.num_synchronized_steps = state["steps"]

    def _detach(self, timeout_s: float) -> None:
        """Ends the threads and the process groups. The weights stay as they are."""
        if self._overlap:
            self._overlap.close(timeout_s)
        super()._detach(timeout_s)

    def _average(self, index: int) -> None:
        """Averages the parameters of an optimizer, or starts to."""
        replicas = self._optimizer_syncs[index].replicas
        if self._overlap is None:
            replicas.synchronize()
        else:
            self._overlap.start(index)
            replicas.diverged = False

    def _shape_settings(self) -> dict[str, Any]:
        """Returns the settings that determine the structure of :meth:`state_dict`."""
        config = self.config
        return {
            "compression": str(config.compression),
            "error_feedback": config.uses_error_feedback,
            "aggregation": config.aggregation,
            "bucket_mb": config.bucket_mb,
            "outer_lr": config.outer_lr,
            "outer_momentum": [config.outer_momentum_of(sync.optimizer) for sync in self._optimizer_syncs],
        }
