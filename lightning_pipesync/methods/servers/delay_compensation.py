"""DC-ASGD: gradients as they would be at the weights that they update (Zheng et al., ICML 2017, arXiv 1609.08326)."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def compensate(gradient: Tensor, now: Tensor, then: Tensor, strength: float) -> None:
    """Adds to a gradient what its Taylor expansion has for the distance of two weights, in place (Eq. 10).

    The Hessian is approximated by ``strength`` times the diagonal of the outer product of the gradient.

    Args:
        gradient: of shape (number of values), computed at ``then``.
        now: the weights that it is to update, of the same shape.
        then: the weights that the learner had.
        strength: lambda.
    """
    gradient.addcmul_(gradient * gradient, (now - then).to(gradient.dtype), value=strength)
