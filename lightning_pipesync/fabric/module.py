"""A model in a Fabric loop, and the method that trains it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipesync.core.buckets import buffer_reader
from lightning_pipesync.core.exchange import exchange_fused
from lightning_pipesync.core.handle import Handle
from lightning_pipesync.methods.method import AveragingMethod, SyncMethod, parameters_of

#: MiB that travel in one piece when a model is set up before its optimizers.
PIECE_MB = 25.0


class TrainedModule:
    """A model that was set up, its optimizers and their method.

    Models and optimizers may be set up one after the other, and nobody says which optimizer is the last one. The method
    is then attached by the first forward pass that computes gradients, or by whatever else needs it.

    Attributes:
        module: the user's model.
        optimizers: those that have been set up.
        method: what trains the model; None until it is attached.

    Args:
        module: the user's model.
        attach: creates the method; called on all ranks.
    """

    def __init__(self, module: nn.Module, attach: Callable[[nn.Module, list[Optimizer]], SyncMethod]) -> None:
        self.module = module
        self.optimizers: list[Optimizer] = []
        self.method: SyncMethod | None = None
        self._attach = attach
        self._wrapper: weakref.ref[SyncedModule] | None = None

    def wrapped(self) -> SyncedModule:
        """Returns what stands for the model in the user's loop."""
        wrapper = SyncedModule(self)
        self._wrapper = weakref.ref(wrapper)
        return wrapper

    @property
    def is_held(self) -> bool:
        """Whether somebody still holds what :meth:`wrapped` returned."""
        return self._wrapper is not None and self._wrapper() is not None

    def attached(self) -> SyncMethod:
        """Returns the method; attaches it first, a collective call, if that is still to be done."""
        if self.method is None:
            self.method = self._attach(self.module, self.optimizers)
        return self.method

    def detach(self, timeout_s: float = 10.0) -> None:
        """Has the model and the optimizers be plain ones again."""
        if self.method is not None:
            self.method.detach(timeout_s)
            self.method = None

    def add(self, optimizer: Optimizer) -> None:
        """Has the method train with ``optimizer``, too.

        Raises:
            ValueError: the training has begun.
        """
        if self.method is not None:
            raise ValueError(
                f"{type(optimizer).__name__} is set up after the training of its model has begun: set up all "
                "optimizers of a model before its first forward pass."
            )
        self.optimizers.append(optimizer)

    def has_parameters_of(self, optimizer: Optimizer) -> bool:
        """Returns whether ``optimizer`` is over parameters of this model alone."""
        own = {id(parameter) for parameter in self.module.parameters()}
        return all(id(parameter) in own for parameter in parameters_of(optimizer))

    def broadcast(self) -> None:
        """Gives all ranks the weights and buffers of rank 0; a collective call."""

        def start(flat: Tensor) -> Handle[Any]:
            work = dist.broadcast(flat, 0, async_op=True)
            return Handle(work.wait)

        tensors = [*self.module.parameters(), *buffer_reader(self.module)()]
        exchange_fused(tensors, PIECE_MB, start)


class SyncedModule(nn.Module):
    """What ``fabric.setup`` wraps, where DDP has its own wrapper.

    Attributes:
        module: the user's model.
        trained: the same with its optimizers and their method.

    Args:
        trained: the model.
    """

    def __init__(self, trained: TrainedModule) -> None:
        super().__init__()
        self.module = trained.module
        self.trained = trained

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and self.trained.optimizers:
            self.trained.attached()
        return self.module(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Within it backward passes accumulate gradients, and communicate nothing."""
        method = self.trained.attached() if self.trained.optimizers else None
        return method.no_sync() if isinstance(method, AveragingMethod) else nullcontext()


class BackwardSyncControl:
    """What ``fabric.no_backward_sync`` asks."""

    def no_backward_sync(self, module: SyncedModule, enabled: bool = True) -> AbstractContextManager[None]:
        """Within it, if ``enabled``, backward passes accumulate gradients."""
        return module.no_sync() if enabled else nullcontext()
