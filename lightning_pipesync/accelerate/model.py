"""What ``prepare`` returns for a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from lightning_pipesync.methods.method import AveragingMethod, SyncMethod


class SynchronizedModel(nn.Module):
    """A model whose gradients and weights a method looks after, in the place of ``DistributedDataParallel``.

    In a validation it has the consolidated weights: :meth:`eval` makes them, and so it is a collective call where
    ranks hold weights or buffers of their own (SelSync; BatchNorm). The next forward pass of the training undoes that.

    Args:
        module: the user's own model, or its compiled form.

    Attributes:
        module: the model that was given.
        method: what looks after it; None before its optimizer is prepared, too.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.method: SyncMethod | None = None
        self.training = module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model.

        Raises:
            RuntimeError: a training begins, and nobody would synchronize the gradients.
        """
        if self.training and torch.is_grad_enabled():
            self._begin_to_train()
        return self.module(*args, **kwargs)

    def train(self, mode: bool = True) -> SynchronizedModel:
        """Sets the model's mode; before an evaluation it consolidates the weights."""
        super().train(mode)
        if not mode and self.method is not None and not self.method.flushed:
            self.method.flush()
        return self

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it gradients are accumulated, and nothing is communicated."""
        if isinstance(self.method, AveragingMethod):
            with self.method.no_sync():
                yield
        else:
            yield  # without a step there is nothing that travels

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Returns the parameters as :class:`torch.nn.Module` does, when their weights are those after the last step."""
        if self.method is not None:
            self.method.synchronize()
        return super().named_parameters(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients; the weights may still be under way."""
        self.module.zero_grad(set_to_none)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Returns a copy of the model itself, which nobody synchronizes."""
        if self.method is not None:
            self.method.synchronize()
        return deepcopy(self.module, memo)

    def _begin_to_train(self) -> None:
        if self.method is None:
            if any(parameter.requires_grad for parameter in self.module.parameters()):
                raise RuntimeError(
                    f"The {type(self.module).__name__} is trained, and its optimizer was not prepared, so nobody would "
                    "synchronize its gradients: call model, optimizer = accelerator.prepare(model, optimizer)."
                )
        elif self.method.flushed:
            self.method.resume()
