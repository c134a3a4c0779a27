"""The wrapper of a model that a method trains, in place of ``DistributedDataParallel``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from lightning_pipesync.methods.sync_method import SyncMethod


class SyncedModule(nn.Module):
    """A model whose gradients and weights a method synchronizes.

    Attributes:
        module: the user's model, or its compiled form.
        automatic: whether :meth:`eval` consolidates the weights, which makes it a collective call, and the next forward
            pass of the training restores them; and whether a forward pass of a training without a method raises. If
            False, the loop calls :meth:`SyncMethod.flush` and :meth:`SyncMethod.resume` itself.
        method: the method that synchronizes it; None until the model's optimizer is prepared.
    """

    def __init__(self, module: nn.Module, automatic: bool) -> None:
        super().__init__()
        self.module = module
        self.method: SyncMethod | None = None
        self.training = module.training
        self.automatic = automatic

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model; raises a RuntimeError if a training begins and no method synchronizes the gradients."""
        if self.automatic and self.training and torch.is_grad_enabled():
            self.begin_to_train()
        try:
            return self.module(*args, **kwargs)
        except RuntimeError as error:
            if self.method is not None:
                self.method.transport.watch.name_rank_in(error)
            raise

    def train(self, mode: bool = True) -> SyncedModule:
        """Sets the model's mode; if ``automatic``, evaluation mode consolidates the weights."""
        super().train(mode)
        if self.automatic and not mode and self.method is not None and not self.method.flushed:
            self.method.flush()
        return self

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context manager that accumulates gradients without communication."""
        return nullcontext() if self.method is None else self.method.no_sync()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Returns the parameters as :class:`torch.nn.Module` does, after waiting for the last step's weights."""
        if self.method is not None:
            self.method.synchronize()
        return super().named_parameters(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, without waiting for weights in flight."""
        self.module.zero_grad(set_to_none)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Returns a copy of the wrapped model, which is not synchronized."""
        if self.method is not None:
            self.method.synchronize()
        return deepcopy(self.module, memo)

    def begin_to_train(self) -> None:
        """Undoes a flush, and joins other jobs' replicas, before a forward pass of the training.

        Raises a RuntimeError if there is no method.
        """
        if self.method is not None:
            if self.method.flushed:
                self.method.resume()
            self.method.join()
        elif any(parameter.requires_grad for parameter in self.module.parameters()):
            raise RuntimeError(
                f"The {type(self.module).__name__} is trained, and its optimizer was not prepared, so its gradients "
                "are not synchronized: call model, optimizer = accelerator.prepare(model, optimizer)."
            )
