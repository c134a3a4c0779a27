"""The input of a stage, which collects the gradients for the stage before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_pipesync.core.torch_private import map_tensors


class StageInput:
    """Activations from the stage before, and their gradients.

    Attributes:
        tree: the activations, which are not leaves of the graph, so that the first layer may work in place.
        gradients: the gradients of those that require one, in order; None if the layers do not use it.

    Args:
        tree: tensors in nested containers.
    """

    def __init__(self, tree: Any) -> None:
        self.gradients: list[Tensor | None] = []
        self.tree = map_tensors(self._watched, tree)

    def _watched(self, tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        anchor = torch.empty((), device=tensor.device, requires_grad=True)
        inner: Tensor = _Inner.apply(anchor, tensor.detach())
        gradients, position = self.gradients, len(self.gradients)
        gradients.append(None)

        def keep(gradient: Tensor) -> None:  # no reference to self, which would be a cycle through the graph
            gradients[position] = gradient

        inner.register_hook(keep)
        return inner


class _Inner(torch.autograd.Function):
    """Returns the same tensor as a non-leaf."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None
