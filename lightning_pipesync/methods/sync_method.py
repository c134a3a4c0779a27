"""Base class of the methods that synchronize what a training loop computes."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle
from typing_extensions import deprecated

from lightning_pipesync.core.buckets import MIB, buffer_reader
from lightning_pipesync.core.comm.exchange import exchange_fused
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.consistency import (
    check_same_values,
    collect_consistent_parameters,
    on_all_ranks,
    raise_on_all_ranks,
)
from lightning_pipesync.core.dtensors import (
    ShardedOptimizers,
    groups_of_shards,
    is_sharded,
    local_of,
    problem_of_optimizers,
    replicas_of_model,
)
from lightning_pipesync.core.parameters import NamedParameter, device_of, hook_gradient
from lightning_pipesync.core.torch_private import found_overflow, has_unscaled, mark_overflow, reshard
from lightning_pipesync.data.train_loader import TrainLoader
from lightning_pipesync.data.training_data import TrainingData
from lightning_pipesync.methods.framework_hooks import FrameworkHooks
from lightning_pipesync.methods.loads import Loads
from lightning_pipesync.methods.method import PIECE_MB, Method, group_members, parameters_of
from lightning_pipesync.methods.settings import config_from, warn_of_ignored, warn_of_one_rank
from lightning_pipesync.methods.step import SCALER_RECIPE, Stage, StepRecord
from lightning_pipesync.methods.sync_batch_norm import warn_of_sync_batch_norm
from lightning_pipesync.methods.user_steps import UserSteps

T = TypeVar("T")


class SyncMethod(FrameworkHooks, Method):
    """Takes over gradient synchronization and the optimizer step of one module on every rank.

    The constructor attaches the method: it broadcasts rank 0's weights and buffers. A plain loop calls :meth:`step` in
    place of ``optimizer.step()``. With several optimizers, each call names its optimizer. The calls of a step follow
    the order of :class:`Stage`; a repeated call in the same step does nothing. With a loss scaler::

        scaler.scale(loss).backward()
        sync.reduce(scaler=scaler)                  # in place of scaler.unscale_(optimizer)
        sync.clip(1.0)
        sync.step(lambda: scaler.step(optimizer))   # all ranks skip the step, or none
        scaler.update()

    Args:
        module: the model, the same on all ranks.
        optimizer: one or several torch optimizers over its parameters.
        config: the settings; alternatively, pass them as keywords.
        backend: backend of the method's communication, see :class:`Transport`.
        replicas: the dimension of a device mesh along which the model is replicated, such as ``mesh["replicas"]``,
            where ``fully_shard`` has sharded it along another; None: as the mesh of its parameters says, the one
            dimension along which they are not sharded. Every rank has a replica of a model that is not sharded.

    Attributes:
        config: the settings.
        reduces_together: whether the gradients of all optimizers are reduced at the same time.
        same_weights: whether all ranks have the same weights and optimizer states at every step. What is loaded into
            them is then compared at the first step and at each :meth:`flush`, and refused if it differs.
        optimizers: the user's own optimizers.
        syncing: whether gradients are synchronized: False within :meth:`no_sync`.
        data: applies the settings of the training data.
        record: the stage of each optimizer in its step.
        user_steps: runs the steps of the user's optimizers, for :meth:`_step`.

    Raises:
        ValueError: the ranks differ in settings, model, optimizers or their states, or the method does not support the
            model or an optimizer.
        RuntimeError: ``torch.distributed`` is not initialized.
    """

    reduces_together: ClassVar[bool] = False
    same_weights: ClassVar[bool] = False

    transport: Transport
    syncing = True

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        config: Any = None,
        *,
        backend: str | None = None,
        replicas: DeviceMesh | None = None,
        **settings: Any,
    ) -> None:
        self.config = config_from(self.config_type, config, settings)
        self.optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        self.flushed = False
        reshard(module)
        self._module, self._mesh = module, replicas or replicas_of_model(module)
        self.record = StepRecord(len(self.optimizers), self.reduces_together)
        self._gradient_hooks: dict[int, RemovableHandle] = {}
        self._loads: Loads | None = None
        self._began = False
        self._followed: list[Callable[[], list[Tensor]]] = []
        self.transport = self._make_transport(device_of(module), backend)
        self.user_steps = UserSteps(self)
        self.transport.end_waits_of(groups_of_shards(module))
        self._sharded = ShardedOptimizers(self.optimizers) if is_sharded(module) else None
        try:
            parameters = on_all_ranks(self.transport.job, self._agreed_parameters)
            raise_on_all_ranks(self.transport.job, self._problem() or self._problem_of_shards())
            named = [(parameter.name, parameter.tensor) for parameter in parameters]
            if self.same_optimizer_states:
                check_same_values(self.transport, named, self.optimizers, weights=False)
            warn_of_ignored(self.config, self.transport.rank)
            warn_of_one_rank(type(self).__name__, self.transport.world_size)
            warn_of_sync_batch_norm(type(self).__name__, module, self.transport)
            exchange_fused([parameter.tensor for parameter in parameters], PIECE_MB, self.transport.broadcast)
            self._read_buffers = buffer_reader(module)
            self._broadcast_buffers()
            self.data = TrainingData(self.config, self.transport)
            self._loads = Loads(module, self.optimizers) if self.same_weights else None
            self._attach(parameters)
        except BaseException:
            SyncMethod._detach(self, timeout_s=1.0)
            raise

    # --- a step -----------------------------------------------------------------------------------------------------

    def reduce(
        self, optimizer: Optimizer | None = None, scaler: torch.amp.GradScaler | None = None, *, unscale: bool = True
    ) -> None:
        """Reduces the gradient of this step, which is complete; then what will be applied may be clipped.

        :meth:`clip` and a :meth:`step` that computes the gradient itself call it. A repeated call does nothing.

        Args:
            optimizer: the optimizer whose gradient is reduced; may be omitted if there is only one.
            scaler: the loss scaler, which unscales the gradient here, in place of ``scaler.unscale_(optimizer)``. It
                skips the update on all ranks if the gradient of some rank is not finite.
            unscale: False reduces only: the scaler unscales later, by itself, after which a further call completes.

        Raises:
            RuntimeError: a peer is lost, or the scaler has unscaled the gradient before it was reduced.
            ValueError: a setting of the training data has no effect, see :meth:`prepare_train_loader`.
        """
        index = self._index(optimizer)
        trained = self.optimizers[index]
        if scaler is not None and not scaler.is_enabled():
            scaler = None
        loss_scale = None if scaler is None else scaler.get_scale()
        self._skip_if_outdated(index)
        if self._sharded is not None:
            self._sharded.follow()
        if self.record.stage(index) < Stage.REDUCED:
            if scaler is not None and has_unscaled(scaler, trained):
                raise RuntimeError(f"The loss scaler has unscaled the gradient before it was reduced. {SCALER_RECIPE}")
            self.data.check_followed()
            if not self._began:
                self._began = True
                self._compare_loaded()
            self._reduce(index, loss_scale)
            self.record.reduced(index)
        if not unscale or self.record.stage(index) == Stage.UNSCALED:
            return
        if scaler is not None and not has_unscaled(scaler, trained):
            scaler.unscale_(trained)
        overflow = self._complete(index, loss_scale)
        if scaler is not None and self.transport.shards is not None:
            overflow |= found_overflow(scaler, trained)
            overflow = any(self.transport.shards.exchange_flags(overflow).wait())
        self.record.unscaled(index, overflow, scaled=scaler is not None)
        if overflow and scaler is not None:
            mark_overflow(scaler, trained)

    def clip(self, max_norm: float, optimizer: Optimizer | None = None) -> Tensor:
        """Clips the gradient that is about to be applied by its global L2 norm; returns that norm (0-dim)."""
        self.reduce(optimizer)
        parameters = self._trained(optimizer)
        self.clip_tensors(self.clipped_along(parameters), max_norm)
        return self.clip_tensors(parameters, max_norm)

    def clip_tensors(
        self, tensors: Sequence[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clips the ``grad`` of tensors, as :func:`torch.nn.utils.clip_grad_norm_`; of shards by that of whole tensors.

        Raises:
            ValueError: they are shards, and ``norm_type`` is not 2.
            RuntimeError: the norm is not finite, and ``error_if_nonfinite``.
        """
        if self.transport.shards is None:
            return torch.nn.utils.clip_grad_norm_(tensors, max_norm, norm_type, error_if_nonfinite)
        if norm_type != 2:
            raise ValueError(f"norm_type={norm_type!r}: of a sharded model only the L2 norm is known. Omit norm_type.")
        own = torch.nn.utils.get_total_norm([tensor.grad for tensor in tensors if tensor.grad is not None])
        norm = own.new_tensor(math.sqrt(self.transport.sum_over_shards(own.item() ** 2)))
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"The norm of the gradient is {norm.item()}: find its cause, or set error_if_nonfinite=False."
            )
        torch.nn.utils.clip_grads_with_norm_(tensors, max_norm, norm)
        return norm

    def clip_value(self, max_value: float, optimizer: Optimizer | None = None) -> None:
        """Clips every value of the gradient that is about to be applied to ``[-max_value, max_value]``."""
        self.reduce(optimizer)
        parameters = self._trained(optimizer)
        torch.nn.utils.clip_grad_value_([*parameters, *self.clipped_along(parameters)], max_value)

    def step(self, update: Callable[[], T] | None = None, optimizer: Optimizer | None = None) -> T | None:
        """Takes the optimizer step, with its communication.

        Args:
            update: updates the weights; None: ``optimizer.step``. :meth:`reduce` must be called before, or
                within it once the gradient is complete, as at the end of a closure.
            optimizer: the optimizer that steps; may be omitted if there is only one.

        Returns:
            The result of ``update``.

        Raises:
            RuntimeError: a peer is lost, or a call is out of order.
        """
        index = self._index(optimizer)
        self._skip_if_outdated(index)
        if update == self.optimizers[index].step:  # bound, before it can be replaced
            update = None
        with self.record.stepping(index):
            return self._step(index, update)

    @deprecated("Call reduce(optimizer) in place of after_backward(optimizer).", category=FutureWarning)
    def after_backward(self, optimizer: Optimizer | None = None) -> None:
        """Former name of :meth:`reduce`."""
        self.reduce(optimizer)

    @deprecated("Call reduce(optimizer, scaler) in place of unscale(scaler, optimizer).", category=FutureWarning)
    def unscale(self, scaler: torch.amp.GradScaler | None, optimizer: Optimizer | None = None) -> None:
        """Former name of :meth:`reduce` with a loss scaler."""
        self.reduce(optimizer, scaler)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager in which backward passes accumulate this rank's gradients without communication."""
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before

    # --- data -------------------------------------------------------------------------------------------------------

    def prepare_train_loader(
        self, loader: DataLoader[Any], seed: int = 0, to_device: Callable[[Any], Any] | None = None
    ) -> TrainLoader:
        """Returns the batches of ``loader`` according to the settings of the training data; a collective call.

        With ``partition="seldp"``, a loader of a map-style data set, shuffled or not, or with torch's
        ``DistributedSampler``, gets the order of SelDP; with ``"defdp"``, that of ``DistributedSampler``. A loader with
        another sampler keeps its order. With ``injection``, the batch size is that of Eq. 3, and rows of other ranks
        are appended to each batch. ``loader`` itself is not changed.

        Args:
            loader: the loader of the training data, the same on all ranks.
            seed: seed of the order, the same on all ranks; a ``DistributedSampler`` keeps its own.
            to_device: moves a batch to the training device; None leaves batches where ``loader`` puts them.

        Raises:
            ValueError: on every rank: a setting has no effect on this loader, the data set has fewer samples than there
                are ranks, or the numbers of batches differ between ranks.
        """
        return self.data.prepare(loader, seed, to_device)

    # --- weights ----------------------------------------------------------------------------------------------------

    @property
    def same_optimizer_states(self) -> bool:
        """Whether all ranks begin with the same optimizer states, so that different ones are refused."""
        return True

    def synchronize(self) -> None:
        """Waits for the last step's update of this rank's weights; not a collective call."""

    @contextmanager
    def true_weights(self) -> Iterator[None]:
        """Within it the parameters hold the weights after the last update; not a collective call."""
        self.synchronize()
        yield

    @abstractmethod
    def resume(self) -> None:
        """Undoes :meth:`flush`, but keeps changes to the weights since then; does nothing if not flushed.

        Not a collective call.
        """

    def follow(self, module: nn.Module) -> None:
        """Makes :meth:`flush` also consolidate ``module``, a running average of this rank's weights.

        Its buffers become rank 0's. Its parameters are the same on all ranks if the weights are.
        """
        self._followed.append(buffer_reader(module))

    # --- state ------------------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Returns MiB sent, seconds of exposed communication, and the method's further metrics, by name."""
        traffic = self.transport.traffic
        return {"mib_sent": traffic.total_bytes_sent / MIB, "exposed_seconds": traffic.total_seconds_waited}

    @property
    def ddp_bytes(self) -> float | None:
        """Each rank's share of an all-reduce of the gradients; None with several optimizers, whose steps differ."""
        if len(self.optimizers) > 1:
            return None
        gradients = sum(parameter.nbytes for parameter in self._trained(None) if parameter.requires_grad)
        return 2 * (self.transport.world_size - 1) / self.transport.world_size * gradients

    def optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the whole optimizer state, as ``optimizer.state_dict()`` without the method; a collective call.

        Of a sharded model it has DTensors.
        """
        with self.given_back():
            return optimizer.state_dict()

    @contextmanager
    def given_back(self) -> Iterator[None]:
        """Context in which the optimizers have the model's own parameters, DTensors if it is sharded, and their states.

        Within it save them, as with ``torch.distributed.checkpoint``; a collective call.
        """
        with nullcontext() if self._sharded is None else self._sharded.given_back():
            yield

    def _detach(self, timeout_s: float) -> None:
        for hook in self._gradient_hooks.values():
            hook.remove()
        self.user_steps.release()
        if self._sharded is not None:
            self._sharded.release()
        if self._loads is not None:
            self._loads.remove()
        self.transport.close(timeout_s)

    # --- what a method implements -----------------------------------------------------------------------------------

    @abstractmethod
    def _attach(self, parameters: Sequence[NamedParameter]) -> None:
        """Prepares the module and the optimizers for the method; called once, on all ranks."""

    @abstractmethod
    def _reduce(self, index: int, loss_scale: float | None) -> None:
        """Reduces an optimizer's complete gradient, which is scaled by ``loss_scale``; a collective call."""

    def _complete(self, index: int, loss_scale: float | None) -> bool:
        """Completes :meth:`_reduce` once ``p.grad`` is unscaled.

        Returns whether the gradient of some rank is not finite, so that the loss scaler, which has checked only that of
        this rank, must skip the update; the same on all ranks.
        """
        return False

    def check_gradient(self, index: int) -> None:
        """Raises a RuntimeError if the gradient of an optimizer that is about to step is not what was reduced."""

    def _skip(self, index: int) -> None:
        """Undoes :meth:`_reduce`: the step was skipped."""

    @abstractmethod
    def _step(self, index: int, update: Callable[[], T] | None) -> T | None:
        """Takes an optimizer's step, see :meth:`step`."""

    def _problem(self) -> ValueError | None:
        """Returns the error if the settings do not support the optimizers; None if they do."""
        return None

    def _problem_of_shards(self) -> ValueError | None:
        """Returns the error if settings or optimizers do not support replicas of several ranks, and there are such."""
        if self.transport.shards is None:
            return None
        if self.config.injection is not None:
            return ValueError(
                f"injection={self.config.injection!r} sends rows to all ranks, and a replica has "
                f"{self.transport.ranks_per_replica}: set injection=None with replicas=."
            )
        return problem_of_optimizers(self.optimizers, getattr(self.config, "elementwise", ()))

    def _make_transport(self, device: torch.device, backend: str | None) -> Transport:
        settings = self._transport_settings()
        return Transport(device, timeout_s=self.config.timeout_s, backend=backend, replicas=self._mesh, **settings)

    def _transport_settings(self) -> dict[str, Any]:
        """Returns further arguments of the method's :class:`Transport`."""
        return {}

    def _agreed_parameters(self) -> list[NamedParameter]:
        """Checks that all ranks have the same parameters, hooks their gradients and returns them; a collective call."""
        parameters = collect_consistent_parameters(self.transport, self.config, self._module, self.optimizers)
        for parameter in parameters:
            if parameter.group and id(parameter.tensor) not in self._gradient_hooks:
                hook = self.record.gradient_hook(parameter.group[0])
                self._gradient_hooks[id(parameter.tensor)] = hook_gradient(parameter.tensor, hook)
        self._agreed_members = group_members(self.optimizers)
        return parameters

    @property
    def _has_new_parameters(self) -> bool:
        """Whether an optimizer has other parameters than the ranks agreed on: a callback has unfrozen layers, say."""
        return self._agreed_members != group_members(self.optimizers)

    def _compare_loaded(self) -> None:
        """Raises on all ranks if some rank has loaded a state and ranks now differ; a collective call."""
        if self._loads is None or not any(self.transport.exchange_flags(self._loads.take()).wait()):
            return
        with self.true_weights():
            named = [(name, local_of(parameter)) for name, parameter in self._module.named_parameters()]
            check_same_values(self.transport, named, self.optimizers, weights=True)

    def _broadcast_buffers(self) -> None:
        exchange_fused(self._shared_tensors(), PIECE_MB, self.transport.broadcast)

    def _shared_tensors(self) -> list[Tensor]:
        """Returns the buffers, and what :meth:`flush` makes one rank's of the modules that :meth:`follow` was given."""
        return [*self._read_buffers(), *(tensor for read in self._followed for tensor in read())]

    def _skip_if_outdated(self, index: int) -> None:
        if self.record.is_outdated(index):
            self._skip(index)
            self.record.restart(index)

    def _trained(self, optimizer: Optimizer | None) -> list[Tensor]:
        return parameters_of(self.optimizers[self._index(optimizer)])

    def _index(self, optimizer: Optimizer | None) -> int:
        """Returns the index of an optimizer; None means the only one."""
        if optimizer is None and len(self.optimizers) > 1:
            raise ValueError(f"There are {len(self.optimizers)} optimizers: choose one with optimizer=.")
        for index, known in enumerate(self.optimizers):
            if optimizer is None or known is optimizer:
                return index
        raise ValueError(f"{type(optimizer).__name__} is not an optimizer that was passed to {type(self).__name__}.")
