"""The weights that each learner has, as a server knows them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_pipesync.methods.servers.messages import WeightsMessage
from lightning_pipesync.methods.servers.policies import Gradient


class Backups:
    """The weights that a server has sent to each learner, at which it computes gradients (DC-ASGD, Algorithm 2, w_bak).

    Args:
        values: of the server's shards, which all learners have at first.
    """

    def __init__(self, values: Sequence[Tensor]) -> None:
        self._first = [value.clone() for value in values]
        self._sent: dict[int, dict[tuple[int, float], list[Tensor]]] = {}  # by learner, version, and updates ahead

    def keep(self, rank: int, weights: WeightsMessage, values: list[Tensor]) -> None:
        """Keeps what a learner gets, which must not be changed afterwards."""
        self._sent.setdefault(rank, {})[weights.version, weights.ahead] = values

    def at(self, gradient: Gradient) -> list[Tensor]:
        """Returns the weights at which a gradient was computed. Older ones of that learner are dropped."""
        kept = self._sent.setdefault(gradient.rank, {})
        for older in [key for key in kept if key[0] < gradient.version]:
            del kept[older]
        return kept.get((gradient.version, gradient.ahead), self._first)
