"""DC-ASGD: gradients as they would be at the weights that they update (Zheng et al., ICML 2017, arXiv 1609.08326)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_pipesync.methods.parameter_server.algorithm import Gradient


class Backups:
    """The weights that a server has sent to each learner, at which it computes gradients (Algorithm 2, w_bak).

    Args:
        values: of the server's shards, which all learners have at first.
    """

    def __init__(self, values: Sequence[Tensor]) -> None:
        self._first = [value.clone() for value in values]
        self._sent: dict[int, dict[int, list[Tensor]]] = {}  # by learner and version

    def keep(self, rank: int, version: int, values: list[Tensor]) -> None:
        """Keeps what a learner gets, which must not be changed afterwards."""
        self._sent.setdefault(rank, {})[version] = values

    def at(self, gradient: Gradient) -> list[Tensor]:
        """Returns the weights at which a gradient was computed. Older ones of that learner are dropped."""
        kept = self._sent.setdefault(gradient.rank, {})
        for version in [version for version in kept if version < gradient.version]:
            del kept[version]
        return kept.get(gradient.version, self._first)


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
