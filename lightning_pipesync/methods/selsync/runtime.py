"""SelSync in a training loop (SelSync, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from lightning_pipesync.core.buckets import buffer_reader
from lightning_pipesync.core.parameters import NamedParameter, hook_gradient
from lightning_pipesync.methods.method import SyncMethod
from lightning_pipesync.methods.selsync.config import SelSyncConfig
from lightning_pipesync.methods.selsync.unit import Decision, OptimizerUnit
from lightning_pipesync.methods.selsync.untrained import UntrainedTensors

T = TypeVar("T")


class SelSync(SyncMethod):
    """Local steps, synchronized only when some rank's gradient changes by more than delta.

    Every rank trains its own replica with its own optimizer. At each step it compares the norm of its gradient with
    that of the steps before, and tells the others in one byte whether the change is at least ``delta``. If any rank's
    is, all average their parameters after the update (or, with ``aggregation="gradients"``, their gradients before
    it). Floating-point buffers that changed are averaged with them, integer ones follow rank 0. A step that stays local
    sends the byte and nothing else. Optimizer state always stays the rank's own, as in the paper.

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
            sync.resume()                               # each rank's own again
        sync.flush()
        sync.detach()

    Arguments, errors and further calls are those of :class:`SyncMethod`; the settings are in :class:`SelSyncConfig`.

    All ranks may skip a step once its gradient was measured, and go on with the next backward pass: it is as if this
    one's gradient had never been measured. Accumulating on, too, makes it be measured anew.

    Attributes:
        last: the decision about the last step.
        num_local_steps: steps so far that stayed local.
        num_synchronized_steps: steps so far that were synchronized.
    """

    name = "selsync"
    config_type = SelSyncConfig
    shown_metrics = ("lssr", "relative_gradient_change", "mib_sent")

    config: SelSyncConfig

    def _attach(self, parameters: Sequence[NamedParameter]) -> None:
        self._units = [
            OptimizerUnit(opt, [p for p in parameters if p.group and p.group[0] == i], self.config, self.transport)
            for i, opt in enumerate(self.optimizers)
        ]
        self._hooks = [
            hook_gradient(parameter, self._protocol.gradient_hook(i))
            for i, unit in enumerate(self._units)
            for parameter in unit.parameters
        ]
        others = [parameter.tensor for parameter in parameters if parameter.group is None]
        self._stepped = self._units[0]
        self._untrained = self._untrained_tensors(others, self._module)
        self._followers: list[UntrainedTensors] = []
        self._followers_diverged = False
        self.last = Decision(delta=self._units[0].threshold.delta)
        self.num_local_steps = 0
        self.num_synchronized_steps = 0

    @property
    def lssr(self) -> float:
        """Local-to-synchronous step ratio (Eq. 4): the share of the steps that stayed local."""
        steps = self.num_local_steps + self.num_synchronized_steps
        return self.num_local_steps / steps if steps else 0.0

    @property
    def diverged(self) -> bool:
        """Whether the weights may be this rank's own."""
        return not self.flushed and any(unit.replicas.diverged for unit in self._units)

    def _reduce(self, index: int, loss_scale: float | None) -> None:
        """Begins a step: the gradient is measured when it is unscaled."""
        if self.flushed:  # the gradient is that of the average, and from there it goes on
            self._keep_average()

    def _unscale(self, index: int, loss_scale: float | None) -> bool:
        """Measures the gradient (accumulated and unscaled, not yet clipped); averages it if gradients are aggregated.

        Returns:
            Whether the gradient was averaged with one that is not finite.

        Raises:
            RuntimeError: some rank has skipped a step that another one has taken; or a peer is lost.
        """
        unit = self._units[index]
        unit.measure()
        # On CUDA the host would have to wait for the backward pass here. The update is enqueued first.
        if unit.gradients is not None or self.transport.device.type != "cuda":
            unit.send_flag()
        if unit.gradients is None or not (decision := unit.decide()).synchronized:
            return False
        unit.gradients.average(decision.missing_gradient)
        return decision.not_finite

    def _skip(self, index: int) -> None:
        self._units[index].skip()

    def _step(self, index: int, update: Callable[[], T] | None) -> T | None:
        """Updates this rank's weights, and averages them with all others' if some rank's gradient changed enough.

        Raises:
            RuntimeError: ``update`` was given, and nobody called :meth:`after_backward` since the last backward pass;
                some rank has skipped a step that another one has taken; or a peer is lost.
        """
        unit = self._units[index]
        if update is None:
            self.after_backward(unit.optimizer)
        with unit.guard.stepping():
            result = unit.optimizer.step() if update is None else update()  # Algorithm 1, line 9
        if not self.is_unscaled(unit.optimizer):
            raise RuntimeError(
                "Call after_backward() when the gradient is complete, before or within update, and after the last "
                "backward pass."
            )
        if not unit.flag_sent:
            unit.send_flag()
        decision = unit.decision or unit.decide()
        if decision.synchronized:
            if unit.gradients is None:
                unit.replicas.synchronize()  # Algorithm 1, lines 16 and 17
            self._untrained.average()
            self.num_synchronized_steps += 1
        else:
            self.num_local_steps += 1
            unit.replicas.diverged = True
        self._followers_diverged |= any(unit.replicas.diverged for unit in self._units)
        unit.finish_step()
        self._stepped, self.last = unit, decision
        return result

    def follow(self, module: nn.Module) -> None:
        """Has :meth:`flush` average ``module``, too: a running average of this rank's weights (EMA), say.

        As averages commute, it then is the running average of the averaged weights. It keeps the average afterwards.
        """
        self._followers.append(self._untrained_tensors(list(module.parameters()), module))

    def flush(self) -> None:
        """Makes the weights and buffers the average of the replicas, which is exact whatever the codec.

        Raises:
            RuntimeError: another rank takes a step, or has skipped one that this one has taken; or a peer is lost.
        """
        if self.flushed:
            return
        for unit in self._units:
            unit.agree_to_consolidate()
            unit.replicas.swap_in_average()
        self._untrained.swap_in_average()
        if self._followers_diverged:
            for follower in self._followers:
                follower.average()
        self._followers_diverged = False
        self.flushed = True

    def resume(self) -> None:
        """Gives this rank its own replica back, except for what was written to the weights since the flush."""
        for unit in self._units:
            unit.replicas.swap_back()
        self._untrained.swap_back()
        self.flushed = False

    def metrics(self) -> dict[str, float]:
        """Returns LSSR, delta, this rank's relative gradient change, MiB sent and seconds of exposed communication."""
        return {
            "lssr": self.lssr,
            "relative_gradient_change": self.last.relative_change,
            "delta": self._stepped.threshold.delta,
            **super().metrics(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's replica, optimizer state, trackers, thresholds, counters and codec residuals."""
        return {
            "units": [
                {
                    "optimizer": unit.optimizer.state_dict(),
                    "tracker": unit.tracker.state_dict(),
                    "threshold": unit.threshold.state_dict(),
                    "replicas": unit.replicas.state_dict(),
                    "gradients": unit.gradients.state_dict() if unit.gradients else {},
                }
                for unit in self._units
            ],
            "untrained": self._untrained.state_dict(),
            "steps": [self.num_local_steps, self.num_synchronized_steps],
            "traffic": self.transport.traffic.state_dict(),
            "injection": self.data.injection.state_dict() if self.data.injection else {},
            "settings": self._shape_settings(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what :meth:`state_dict` returned on this rank, the consolidated weights being loaded already.

        Raises:
            ValueError: the state is of other settings of compression, error feedback, aggregation, outer step or
                bucket size.
        """
        if state["settings"] != self._shape_settings():
            raise ValueError(
                f"The checkpoint was written with {state['settings']}, this run has {self._shape_settings()}. Use the "
                "same settings, or remove the key 'pipesync' from the checkpoint to start from the averaged weights."
            )
        for unit, saved in zip(self._units, state["units"], strict=True):
            unit.optimizer.load_state_dict(saved["optimizer"])
            unit.tracker.load_state_dict(saved["tracker"])
            unit.threshold.load_state_dict(saved["threshold"])
            unit.replicas.load_state_dict(saved["replicas"])
            if unit.gradients:
                unit.gradients.load_state_dict(saved["gradients"])
        self._untrained.load_state_dict(state["untrained"])
        self.flushed = False
        self.num_local_steps, self.num_synchronized_steps = state["steps"]
        self.transport.traffic.load_state_dict(state["traffic"])
        if self.data.injection and state["injection"]:
            self.data.injection.load_state_dict(state["injection"])

    def detach(self, timeout_s: float = 10.0) -> None:
        """Ends the threads and process groups; the weights stay as they are."""
        for hook in self._hooks:
            hook.remove()
        for unit in self._units:
            unit.guard.release()
        self.transport.close(timeout_s)

    def _keep_average(self) -> None:
        for unit in self._units:
            unit.replicas.keep_average()
        self._untrained.keep_average()
        self.flushed = False

    def _untrained_tensors(self, parameters: list[Tensor], module: nn.Module) -> UntrainedTensors:
        return UntrainedTensors(parameters, buffer_reader(module), self.transport, self.config.bucket_mb)

    def _shape_settings(self) -> dict[str, Any]:
        """The settings that decide what :meth:`state_dict` looks like."""
        config = self.config
        return {
            "compression": str(config.compression),
            "error_feedback": config.feeds_back,
            "aggregation": config.aggregation,
            "bucket_mb": config.bucket_mb,
            "outer_lr": config.outer_lr,
            "outer_momentum": [config.outer_momentum_of(unit.optimizer) for unit in self._units],
        }
