"""Where gradients leave a stage towards the one before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_pipesync.compat import tree_flatten, tree_unflatten


class Entry:
    """Activations that have come from the stage before, and the gradients that go back to it.

    Attributes:
        tree: the activations. Not leaves of a graph: a first layer may work in place.
        gradients: one for each tensor among them that needs one, in order; None where the layers do not use it.

    Args:
        tree: tensors in nested containers.
    """

    def __init__(self, tree: Any) -> None:
        leaves, spec = tree_flatten(tree)
        self.gradients: list[Tensor | None] = []
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaves[i] = self._watched(leaf)
        self.tree = tree_unflatten(leaves, spec)

    def _watched(self, tensor: Tensor) -> Tensor:
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
