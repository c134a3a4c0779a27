"""SelSync in a training loop (SelSync, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipesync.compat import version
from lightning_pipesync.core.agreement import check_agreement
from lightning_pipesync.core.buckets import MIB, Fusion, buffer_buckets, group_by_kind, plan_buckets
from lightning_pipesync.core.parameters import collect_parameters
from lightning_pipesync.core.transport import Transport
from lightning_pipesync.methods.method import SyncMethod
from lightning_pipesync.methods.selsync.config import SelSyncConfig
from lightning_pipesync.methods.selsync.replica import ReplicatedTensors
from lightning_pipesync.methods.selsync.unit import Decision, OptimizerUnit

T = TypeVar("T")


class SelSync(SyncMethod):
    """Local steps, synchronised only when some rank's gradient changes by more than delta.

    Every rank trains its own replica with its own optimizer. At each step it compares the norm of its gradient with
    that of the steps before, and tells the others in one byte whether the change is at least ``delta``. If any rank's
    is, all average their parameters after the update (or, with ``aggregation="gradients"``, their gradients before
    it). Floating-point buffers are averaged with them, integer ones follow rank 0. A step that stays local sends the
    byte and nothing else. Optimizer state always stays the rank's own, as in the paper.

    A plain loop::

        sync = SelSync(model, optimizer, delta=0.3)     # all ranks now have rank 0's weights
        for epoch in range(epochs):
            sampler.set_epoch(epoch)                    # a SelDPSampler
            for x, y in loader:
                optimizer.zero_grad()
                loss(model(x), y).backward()
                sync.step()                             # in place of optimizer.step()
            sync.flush()                                # the weights are the average of the replicas
            validate(model)
            sync.resume()                               # each rank's own again
        sync.flush()
        sync.detach()

    Args:
        module: the model, the same on all ranks.
        optimizer: one or several torch optimizers over its parameters.
        config: the settings; or give them as keywords, see :class:`SelSyncConfig`.
        backend: of the traffic, see :class:`Transport`.

    Attributes:
        config: the settings.
        transport: the way to the other ranks; its ``traffic`` counts bytes and seconds.
        last: the decision about the last step.
        num_local_steps: steps so far that stayed local.
        num_synchronised_steps: steps so far that were synchronised.

    Raises:
        ValueError: the ranks differ in settings or model, or the model or optimizer is one that cannot be trained so.
        RuntimeError: ``torch.distributed`` is not initialised.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        config: SelSyncConfig | None = None,
        *,
        backend: str | None = None,
        **settings: Any,
    ) -> None:
        if config is not None and settings:
            raise ValueError(f"Give the settings as config or as keywords ({', '.join(settings)}), not both.")
        self.config = config or SelSyncConfig(**settings)
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        parameters = collect_parameters(module, optimizers)
        if not any(parameter.group for parameter in parameters):
            raise ValueError("There is nothing to train: no optimizer has a parameter.")
        self._module = module
        self.transport = Transport(parameters[0].tensor.device, timeout_s=self.config.timeout_s, backend=backend)
        try:
            check_agreement(self.transport, self.config, parameters, module)
        except ValueError:
            self.transport.close()
            raise
        self._units = [
            OptimizerUnit(opt, [p for p in parameters if p.group and p.group[0] == i], self.config, self.transport)
            for i, opt in enumerate(optimizers)
        ]
        others = [parameter for parameter in parameters if parameter.group is None]
        plan = plan_buckets(others, Fusion(bucket_mb=self.config.bucket_mb))
        buckets = [[parameter.tensor for parameter in bucket] for bucket in plan]
        self._others = ReplicatedTensors([partial(list, bucket) for bucket in buckets], self.transport)
        self._other_tensors = [parameter.tensor for parameter in others]
        self._buffers = ReplicatedTensors(buffer_buckets(module), self.transport)
        self._followers: list[ReplicatedTensors] = []
        for replicas in self._all_replicas():
            replicas.broadcast()
        self._other_versions = self._versions()
        self.last = Decision()
        self.num_local_steps = 0
        self.num_synchronised_steps = 0

    @property
    def lssr(self) -> float:
        """Local-to-synchronous step ratio (Eq. 4): the share of the steps that stayed local."""
        steps = self.num_local_steps + self.num_synchronised_steps
        return self.num_local_steps / steps if steps else 0.0

    def after_backward(self, optimizer: Optimizer | None = None) -> bool:
        """Measures the gradient (accumulated and unscaled, not yet clipped); averages it if gradients are aggregated.

        Returns:
            Whether the gradient was averaged with one that is not finite.

        Raises:
            RuntimeError: called twice in a step, as by an optimizer that evaluates its closure more than once.
        """
        unit = self._unit(optimizer)
        if unit.measured:
            raise RuntimeError("after_backward() was called twice in a step: a closure may be evaluated only once.")
        unit.measure()
        self._buffers.diverged = True
        # On CUDA the host would have to wait for the backward pass here. The update is enqueued first.
        if unit.gradients is not None or self.transport.device.type != "cuda":
            unit.send_flag(self._have_others_changed())
        if unit.gradients is None or not (decision := unit.decide()).synchronised:
            return False
        unit.gradients.average(decision.missing_gradient)
        return decision.not_finite

    def clip(self, max_norm: float, optimizer: Optimizer | None = None) -> Tensor:
        """Clips the gradient by its L2 norm: the rank's own, or the average on a step that aggregates gradients."""
        unit = self._unit(optimizer)
        if not unit.measured:
            self.after_backward(optimizer)
        return torch.nn.utils.clip_grad_norm_(unit.parameters, max_norm)

    def step(self, update: Callable[[], T] | None = None, optimizer: Optimizer | None = None) -> T | None:
        """Updates this rank's weights, and averages them with all others' if some rank's gradient changed enough.

        Raises:
            RuntimeError: ``update`` was given, and nobody called :meth:`after_backward`; or a peer is lost.
        """
        unit = self._unit(optimizer)
        if update is None and not unit.measured:
            self.after_backward(optimizer)
        result = unit.optimizer.step() if update is None else update()  # Algorithm 1, line 9
        if not unit.measured:
            raise RuntimeError("Call after_backward() when the gradient is complete, before or within update.")
        if not unit.flag_sent:
            unit.send_flag(self._have_others_changed())
        decision = unit.decision or unit.decide()
        if decision.synchronised:
            self._synchronise(unit, decision)
            self.num_synchronised_steps += 1
        else:
            self.num_local_steps += 1
            for replicas in [unit.replicas, *self._followers]:
                replicas.diverged = True
        unit.finish_step()
        self.last = decision
        return result

    def follow(self, module: nn.Module) -> None:
        """Has :meth:`flush` average ``module``, too: a running average of this rank's weights (EMA), say.

        As averages commute, it then is the running average of the averaged weights. It keeps the average afterwards.
        """
        kinds = group_by_kind([tensor for tensor in module.parameters() if tensor.is_floating_point()])
        parameters: list[Callable[[], list[Tensor]]] = [partial(list, kind) for kind in kinds]
        self._followers.append(ReplicatedTensors([*parameters, *buffer_buckets(module)], self.transport))

    def flush(self) -> None:
        """Makes the weights and buffers the average of the replicas, which is exact whatever the codec."""
        self._agree_on_others()
        for replicas in self._all_replicas():
            replicas.swap_in_average()
        for follower in self._followers:
            if follower.diverged:
                follower.average()

    def resume(self) -> None:
        """Gives this rank its own replica back, except for what was written to the weights since the flush."""
        for replicas in self._all_replicas():
            replicas.swap_back()
        self._other_versions = self._versions()
        self._buffers.diverged = True  # a forward pass is about to change them

    def metrics(self) -> dict[str, float]:
        """Returns LSSR, delta, this rank's relative gradient change, MiB sent and seconds of exposed communication."""
        traffic = self.transport.traffic
        return {
            "lssr": self.lssr,
            "relative_gradient_change": self.last.relative_change,
            "delta": self.config.delta,
            "mib_sent": traffic.total_bytes_sent / MIB,
            "exposed_seconds": traffic.total_seconds_waited,
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's replica and optimizer state, the trackers and counters, and the codec's residuals."""
        return {
            "units": [
                {
                    "optimizer": unit.optimizer.state_dict(),
                    "tracker": unit.tracker.state_dict(),
                    "replicas": unit.replicas.state_dict(),
                    "gradients": unit.gradients.state_dict() if unit.gradients else {},
                }
                for unit in self._units
            ],
            "others": self._others.state_dict(),
            "buffers": self._buffers.state_dict(),
            "steps": [self.num_local_steps, self.num_synchronised_steps],
            "traffic": self.transport.traffic.state_dict(),
            "settings": self._shape_settings(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what :meth:`state_dict` returned on this rank, the consolidated weights being loaded already.

        Raises:
            ValueError: the state is of other settings of compression, aggregation or bucket size.
        """
        if state["settings"] != self._shape_settings():
            raise ValueError(
                f"The checkpoint was written with {state['settings']}, this run has {self._shape_settings()}. Use the "
                "same settings, or remove the key 'pipesync' from the checkpoint to start from the averaged weights."
            )
        for unit, saved in zip(self._units, state["units"], strict=True):
            unit.optimizer.load_state_dict(saved["optimizer"])
            unit.tracker.load_state_dict(saved["tracker"])
            unit.replicas.load_state_dict(saved["replicas"])
            if unit.gradients:
                unit.gradients.load_state_dict(saved["gradients"])
        self._others.load_state_dict(state["others"])
        self._buffers.load_state_dict(state["buffers"])
        self.num_local_steps, self.num_synchronised_steps = state["steps"]
        self.transport.traffic.load_state_dict(state["traffic"])

    def detach(self, timeout_s: float = 10.0) -> None:
        """Ends the threads and process groups; the weights stay as they are."""
        self.transport.close(timeout_s)

    def _synchronise(self, unit: OptimizerUnit, decision: Decision) -> None:
        if unit.gradients is None:
            unit.replicas.synchronise()  # Algorithm 1, lines 16 and 17
        self._buffers.average()
        if decision.others_changed:
            self._others.average()
            self._other_versions = self._versions()

    def _agree_on_others(self) -> None:
        """Finds out whether some rank has written to a parameter that no optimizer has."""
        if self._other_tensors:
            changed = self.transport.exchange_flags(self._have_others_changed()).wait()
            self._others.diverged |= any(changed)

    def _have_others_changed(self) -> bool:
        return self._others.diverged or self._versions() != self._other_versions

    def _versions(self) -> list[int]:
        return [version(tensor) for tensor in self._other_tensors]

    def _all_replicas(self) -> list[ReplicatedTensors]:
        return [*(unit.replicas for unit in self._units), self._others, self._buffers]

    def _unit(self, optimizer: Optimizer | None) -> OptimizerUnit:
        if optimizer is None and len(self._units) > 1:
            raise ValueError(f"There are {len(self._units)} optimizers: say whose step it is with optimizer=.")
        for unit in self._units:
            if optimizer is None or unit.optimizer is optimizer:
                return unit
        raise ValueError(f"{type(optimizer).__name__} is not an optimizer that was given to SelSync.")

    def _shape_settings(self) -> dict[str, Any]:
        """The settings that decide what :meth:`state_dict` looks like."""
        config = self.config
        return {
            "compression": str(config.compression),
            "aggregation": config.aggregation,
            "bucket_mb": config.bucket_mb,
        }
