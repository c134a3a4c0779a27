"""The calls of a step, the same in every loop, and how methods differ for frameworks."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.dtensors import ShardedOptimizers
from lightning_pipesync.core.parameters import norm_of_gradients
from lightning_pipesync.core.torch_private import found_overflow, has_unscaled, mark_overflow
from lightning_pipesync.data.train_loader import TrainLoader
from lightning_pipesync.data.training_data import TrainingData
from lightning_pipesync.methods.method import Method, parameters_of
from lightning_pipesync.methods.step import SCALER_RECIPE, Stage, StepRecord, UserSteps, not_passed

T = TypeVar("T")


class StepCalls(Method):
    """What a training loop calls in each step, in the order of :class:`Stage`, and with it a method's part of a step.

    Attributes:
        optimizers: the user's own optimizers.
        syncing: whether gradients are synchronized: False within :meth:`no_sync`.
        data: applies the settings of the training data.
        record: the stage of each optimizer in its step.
        user_steps: runs the steps of the user's optimizers, for :meth:`_step`.
        applies_grad: whether ``p.grad`` holds the gradient that is about to be applied, once it is reduced.
        resumes_with_own_weights: whether this rank's own weights are in the module after ``load_state_dict``.
    """

    transport: Transport
    optimizers: list[Optimizer]
    syncing = True
    data: TrainingData
    record: StepRecord
    user_steps: UserSteps
    applies_grad: ClassVar[bool] = True
    resumes_with_own_weights: ClassVar[bool] = False
    _sharded: ShardedOptimizers | None  # of a model that is sharded
    _began = False

    @property
    def reduces_together(self) -> bool:
        """Whether the gradients of all optimizers are reduced at the same time."""
        return False

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
                self._begin()
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
        self._reduce_to_clip(optimizer)
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
        own = norm_of_gradients(tensors).item()
        norm = torch.tensor(math.sqrt(self.transport.sum_over_shards(own)), device=self.transport.device)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"The norm of the gradient is {norm.item()}: find its cause, or set error_if_nonfinite=False."
            )
        torch.nn.utils.clip_grads_with_norm_(tensors, max_norm, norm)
        return norm

    def clip_value(self, max_value: float, optimizer: Optimizer | None = None) -> None:
        """Clips every value of the gradient that is about to be applied to ``[-max_value, max_value]``."""
        self._reduce_to_clip(optimizer)
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

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager in which backward passes accumulate this rank's gradients without communication."""
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before

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

    # --- how methods differ for frameworks, and what these tell them --------------------------------------------------

    @property
    def in_lockstep(self) -> bool:
        """Whether all ranks are at the same step, so that a framework may let them wait for each other at each one."""
        return True

    @property
    def diverged(self) -> bool:
        """Whether the weights may be this rank's own."""
        return False

    @property
    def trains_written_weights(self) -> bool:
        """Whether what a callback writes to the weights after :meth:`flush` stays, and is what training continues from.

        False if an update that is in flight, or the weights of a server, come on top.
        """
        return True

    def clipped_along(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Returns tensors whose ``grad`` must be clipped in the same way as that of ``parameters``."""
        return []

    @property
    def has_left(self) -> bool:
        """Whether this job has left the others, which go on: all of its ranks have, after the same step."""
        return False

    def handle_sigterm(self, number: int, frame: Any) -> bool:
        """Called by the handler of SIGTERM; returns False if the method does nothing, otherwise it is to leave.

        Raises:
            SystemExit: there is nothing to wait for.
        """
        return False

    def begin_pass(self) -> None:
        """Called by a framework before the user's code computes a loss and may read any weights."""

    def end_pass(self) -> None:
        """Called by a framework after the last backward pass since :meth:`begin_pass`."""

    def finish(self, before_update: Callable[[Optimizer], object]) -> None:
        """Called by a framework after the last step of a training; a collective call.

        ``before_update`` is called before each further update, when ``p.grad`` holds its gradient.
        """

    def return_optimizer_states(self) -> None:
        """Restores the optimizers' whole state, which :meth:`detach` would drop; a collective call."""

    # --- a method's part ----------------------------------------------------------------------------------------------

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

    @abstractmethod
    def _begin(self) -> None:
        """Called before the first gradient is reduced: raises if what was attached has changed; a collective call."""

    def whole_parameters(self, optimizer: Optimizer) -> AbstractContextManager[None] | None:
        """Returns the context in which an optimizer has whole parameters; None if it steps on this rank's shards."""
        return None if self._sharded is None else self._sharded.stepping(optimizer)

    def _skip_if_outdated(self, index: int) -> None:
        if self.record.is_outdated(index):
            self._skip(index)
            self.record.restart(index)

    def _reduce_to_clip(self, optimizer: Optimizer | None) -> None:
        """Calls :meth:`reduce` unless it was called: then a loss scaler may unscale what is clipped later."""
        index = self._index(optimizer)
        self._skip_if_outdated(index)
        if self.record.stage(index) < Stage.REDUCED:
            self.reduce(optimizer)

    def _trained(self, optimizer: Optimizer | None) -> list[Tensor]:
        return parameters_of(self.optimizers[self._index(optimizer)])

    def _index(self, optimizer: Optimizer | None) -> int:
        """Returns the index of an optimizer; None means the only one."""
        if optimizer is None and len(self.optimizers) > 1:
            raise ValueError(f"There are {len(self.optimizers)} optimizers: choose one with optimizer=.")
        for index, known in enumerate(self.optimizers):
            if optimizer is None or known is optimizer:
                return index
        raise ValueError(not_passed(optimizer, type(self).__name__))
