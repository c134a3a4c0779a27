"""Fabric's calls in a training, translated into calls on a method."""

from __future__ import annotations

import gc
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipesync.core.private_names import Overriding
from lightning_pipesync.core.shutdown import at_shutdown
from lightning_pipesync.core.torch_private import is_unscaled, mark_overflow
from lightning_pipesync.fabric.module import BackwardSyncControl, SyncedModule, TrainedModule
from lightning_pipesync.fabric.private import control_backward_sync, scaler_of, unwrapped
from lightning_pipesync.methods.method import AveragingMethod, SyncMethod, parameters_of
from lightning_pipesync.methods.registry import make_config
from lightning_pipesync.methods.stepping import check_unscaling

if TYPE_CHECKING:  # the mixin serves `lightning` and its twin distribution `lightning_fabric`, whose classes differ
    from lightning.fabric.accelerators import Accelerator
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, Precision
    from lightning.fabric.strategies import DDPStrategy as _Base
else:
    _Base = object


class FabricTrainingMixin(Overriding, _Base):
    """Set-up, steps, clipping, and who may read the weights, whatever the method.

    Attributes:
        name: what the strategy is registered as.
        not_in_fabric: settings that only a Trainer can follow, and what to do in a loop of one's own.
        config: the settings.

    Args:
        accelerator: as in DDPStrategy.
        parallel_devices: as in DDPStrategy.
        cluster_environment: as in DDPStrategy.
        checkpoint_io: as in DDPStrategy.
        precision: as in DDPStrategy.
        process_group_backend: as in DDPStrategy; with ``"gloo"``, CUDA tensors travel through the host.
        start_method: as in DDPStrategy: ``"popen"``, ``"spawn"``, ``"fork"`` or ``"forkserver"``.
        settings: those of the method, by name.

    Raises:
        ValueError: there is no such setting, or it is out of its range; the message names it and its value.
    """

    name: ClassVar[str]
    not_in_fabric: ClassVar[Mapping[str, str]] = {}
    config: Any

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        process_group_backend: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **settings: Any,
    ) -> None:
        for name, instead in self.not_in_fabric.items():
            if name in settings:
                raise ValueError(f"{name}={settings[name]!r} is for the Trainer; in a Fabric loop, {instead}.")
        self.config = make_config(self.name, settings)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=self.config.timeout_s),
            start_method=start_method,
        )
        control_backward_sync(self, BackwardSyncControl())
        self._synced: list[TrainedModule] = []

    @abstractmethod
    def attach_method(self, module: nn.Module, optimizers: list[Optimizer]) -> SyncMethod:
        """Creates the method; called on all ranks when module and optimizers are on their device."""

    def method_of(self, optimizer: Optimizer | None = None) -> SyncMethod:
        """Returns the method that an optimizer is stepped by, for its metrics, say.

        Args:
            optimizer: may be left out if there is but one model with optimizers, or one that this rank still holds.

        Raises:
            ValueError: there are several and none is named, or the optimizer was not set up.
        """
        trained = [synced for synced in self._synced if synced.optimizers]
        if len(trained) > 1:
            trained = [synced for synced in trained if synced.is_held]
        if optimizer is None and len(trained) == 1:
            return trained[0].attached()
        if optimizer is None:
            raise ValueError(
                f"{len(trained)} models have optimizers: say which one is meant with optimizer=. One that is done with "
                "goes at the next fabric.setup(), when no rank holds it any more; fabric.strategy.teardown() ends all."
            )
        synced = self.owner_of(unwrapped(optimizer))
        if synced is None:
            raise ValueError(f"{type(optimizer).__name__} was not set up: call fabric.setup(model, optimizer).")
        return synced.attached()

    @contextmanager
    def consolidated(self) -> Iterator[None]:
        """Within it the weights are the method's consolidated ones, the same on all ranks; buffers, too.

        For validation, and for whatever else reads the weights but a training step or ``fabric.save``, which does it
        itself. A collective call: all ranks enter it.

        Raises:
            RuntimeError: a peer is lost.
        """
        methods = [synced.method for synced in self._synced if synced.method is not None]
        training = [method for method in methods if not method.flushed]
        for method in methods:
            method.flush()
        try:
            yield
        finally:
            for method in training:
                method.resume()

    # --- set-up and end ---------------------------------------------------------------------------------------------

    @override
    def setup_module(self, module: nn.Module) -> SyncedModule:  # type: ignore[override]
        """Gives all ranks the weights of rank 0; optimizers may follow."""
        synced = self._begin(module)
        synced.broadcast()
        return synced.wrapped()

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Has the model that was set up before be trained with ``optimizer``.

        Raises:
            ValueError: no model has all of its parameters, or the model's training has begun.
        """
        self._check(optimizer)
        for synced in self._synced:
            if synced.has_parameters_of(optimizer):
                synced.add(optimizer)
                return optimizer
        raise ValueError(
            f"No model that was set up has all parameters of {type(optimizer).__name__}: call "
            "fabric.setup_module(model) first, with one model for all that an optimizer trains."
        )

    @override
    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Optimizer], *scheduler: Any) -> Any:
        """Attaches the method; a scheduler stays as it is."""
        synced = self._begin(module)
        for optimizer in optimizers:
            self._check(optimizer)
            synced.add(optimizer)
        synced.attached()
        return (synced.wrapped(), optimizers, *scheduler)

    @override
    def teardown(self) -> None:
        """Ends the training: models are plain ones again. Happens by itself when the process ends."""
        self._detach()
        super().teardown()

    # --- a training step --------------------------------------------------------------------------------------------

    @override
    def optimizer_step(self, optimizer: Optimizer, **kwargs: Any) -> Any:  # type: ignore[override]
        method = self.method_of(optimizer)
        closure: Callable[[], Any] | None = kwargs.pop("closure", None)
        if closure is not None:

            def compute() -> Any:
                result = closure()
                self.take_gradient(optimizer)
                return result

            kwargs["closure"] = compute
        elif self._scaler is None or not is_unscaled(self._scaler, optimizer):
            self.take_gradient(optimizer)
        return method.step(partial(super().optimizer_step, optimizer, **kwargs), optimizer)

    def take_gradient(self, optimizer: Optimizer) -> None:
        """Has the gradient be the one that is about to be applied, unscaled and not yet clipped.

        Raises:
            RuntimeError: a peer is lost, or the loss scaler has unscaled the gradient before.
        """
        method, scaler = self.method_of(optimizer), self._scaler
        if method.measured(optimizer):  # it may be clipped in several ways before the step
            return
        loss_scale = None if scaler is None else scaler.get_scale()
        method.before_unscaling(optimizer, loss_scale)
        self.precision.unscale_gradients(optimizer)
        overflow = method.after_unscaling(optimizer, loss_scale)
        if overflow and scaler is not None:
            mark_overflow(scaler, optimizer)

    @override
    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clips the gradient that is about to be applied; returns the norm before.

        Raises:
            ValueError: no rank has that gradient (DeAR), and it is not the L2 norm.
            RuntimeError: the norm is not finite, and ``error_if_nonfinite``.
        """
        method = self.method_of(optimizer)
        if not method.applies_grad and norm_type != 2:
            raise ValueError(
                f"norm_type={norm_type!r}: each rank has a part of the averaged gradient, of which "
                f"strategy={self.name!r} knows the L2 norm only. Leave norm_type out, or give clip_val."
            )
        self.take_gradient(optimizer)
        if method.applies_grad:
            nn.utils.clip_grad_norm_(method.clipped_along(parameters_of(optimizer)), max_norm, norm_type)
            return nn.utils.clip_grad_norm_(parameters_of(optimizer), max_norm, norm_type, error_if_nonfinite)
        norm = method.clip(max_norm, optimizer)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"The norm of the gradient is {norm.item()}, which nothing can be clipped by: find out where that "
                "comes from, or set error_if_nonfinite=False."
            )
        return norm

    @override
    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Clips every value of the gradient that is about to be applied."""
        method = self.method_of(optimizer)
        self.take_gradient(optimizer)
        if isinstance(method, AveragingMethod):
            method.clip_value(clip_val, optimizer)
        else:
            nn.utils.clip_grad_value_(parameters_of(optimizer), clip_val)

    # --- helpers ----------------------------------------------------------------------------------------------------

    @property
    def _scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler of 16-mixed precision."""
        return scaler_of(self.precision)

    @property
    def _traffic_backend(self) -> str | None:
        """Gloo if Fabric has it; otherwise the transport chooses for the device."""
        return "gloo" if self.process_group_backend == "gloo" else None

    def _begin(self, module: nn.Module) -> TrainedModule:
        if not self._synced:
            at_shutdown(self._detach)  # nobody tells a strategy of the end
        else:
            self._let_go(module)
        self._synced.append(TrainedModule(module, self.attach_method))
        return self._synced[-1]

    def _let_go(self, module: nn.Module) -> None:
        """Ends the methods of models that no rank holds any more, and of ``module``; a collective call.

        While one rank holds a model, all take part in what is done with it.
        """
        gc.collect()
        held = [synced.is_held and synced.module is not module for synced in self._synced]
        held_somewhere = torch.tensor(held, dtype=torch.uint8, device=self.root_device)
        dist.all_reduce(held_somewhere, dist.ReduceOp.MAX)
        for synced, keep in zip(self._synced.copy(), held_somewhere.tolist(), strict=True):
            if keep:
                continue
            if synced.method is not None and synced.module is module:  # its training goes on
                synced.method.flush()
                synced.method.return_optimizer_states()
            synced.detach()
            synced.optimizers.clear()
            self._synced.remove(synced)

    def _check(self, optimizer: Optimizer) -> None:
        if self._scaler is not None:
            check_unscaling(optimizer, "precision='16-mixed'", f"strategy={self.name!r}")

    def owner_of(self, optimizer: Optimizer) -> TrainedModule | None:
        """Returns the model that was set up with ``optimizer``; None if there is none."""
        for synced in self._synced:
            if any(known is optimizer for known in synced.optimizers):
                return synced
        return None

    def _detach(self, timeout_s: float = 10.0) -> None:
        """Ends all methods. What is on its way to other ranks arrives, if that does not take longer."""
        for synced in self._synced:
            synced.detach(timeout_s)
            synced.optimizers.clear()
        self._synced.clear()
