"""Where gradients leave a stage towards the one before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_pipesync.core.torch_private import map_tensors


class Entry:
    """Activations that have come from the stage before, and the gradients that go back to it.

    Attributes:
        tree: the activations. Not leaves of a graph: a first layer may work in place.
        gradients: one for each tensor among them that needs one, in order; None where the layers do not use it.

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

        def keep(gradient: Tensor) -> None:  # it must not hold this entry, which holds the graph that holds it
            gradients[position] = gradient

        inner.register_hook(keep)
        return inner


class _Inner(torch.autograd.Function):
    """The same tensor, no longer a leaf."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None
