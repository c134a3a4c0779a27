"""The shortest time of a training step whose layers differ: what nothing can hide of the first and the last ones.

Eqs. 7 and 8 of DeAR know no single tensors. But a gradient cannot be sent before it is ready, and a layer cannot run
before its weights are there: BERT's embeddings, a fifth of its values, are the last to be ready and the first to be
needed. These limits are those of tensors that are sent one by one, without latency, in the best order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_pipesync.core.cost import StepCost, end_of_pipeline


@dataclass(frozen=True)
class LayerTimes:
    """When a tensor's gradient is ready and when it is needed."""

    ready: float  # seconds since backward began
    needed: float  # seconds of computation since forward began
    num_bytes: int
    shape: Sequence[int] = ()  # of this rank's part of the tensor; empty if unknown


class LayerLimits:
    """The limits of :class:`StepCost`, under the same names, for a model whose communicated tensors are ``tensors``."""

    def __init__(self, cost: StepCost, tensors: Sequence[LayerTimes]) -> None:
        self._cost, self._total = cost, sum(tensor.num_bytes for tensor in tensors)
        self._by_ready = sorted(tensors, key=lambda tensor: tensor.ready)
        self._by_need = sorted(tensors, key=lambda tensor: tensor.needed)

    def get(self, name: str) -> float:
        """Returns the limit of that name, in seconds, at least that of :class:`StepCost`."""
        cost = self._cost
        of_layers: dict[str, Callable[[], float]] = {
            "baseline": lambda: cost.forward + self._reduced(cost.all_reduce),
            "two_halves": lambda: self._reduced(cost.reduce_scatter) + self._forward(cost.all_gather),
            "eager": self._eager,
            "under_forward": lambda: cost.backward + self._forward(cost.all_reduce),
            "reduce_scatter_only": lambda: cost.forward + self._reduced(cost.reduce_scatter),
            "all_gather_only": lambda: self._forward(cost.all_gather) + cost.backward,
        }
        limit: float = getattr(cost, name)
        return max(limit, of_layers[name]() + cost.update) if name in of_layers else limit

    def _eager(self) -> float:
        """What is ready after ``r`` and needed before ``n`` is reduced and gathered after ``r`` and before ``n``."""
        needed = np.array([tensor.needed for tensor in self._by_need])
        ready = np.array([tensor.ready for tensor in self._by_need])
        seconds = self._cost.all_reduce / self._total * np.array([tensor.num_bytes for tensor in self._by_need])
        return max(
            float(np.max(r + np.cumsum(np.where(ready >= r, seconds, 0.0)) + self._cost.forward - needed))
            for r in np.unique(ready)
        )

    def _reduced(self, seconds: float) -> float:
        """Returns when all gradients are reduced, since backward began; their operation takes ``seconds`` in all."""
        durations = [seconds * tensor.num_bytes / self._total for tensor in self._by_ready]
        return max(self._cost.backward, end_of_pipeline([tensor.ready for tensor in self._by_ready], durations))

    def _forward(self, seconds: float) -> float:
        """Returns when forward ends, if an operation of ``seconds`` on all weights begins with it."""
        arrived = waited = 0.0
        for tensor in self._by_need:
            arrived += seconds * tensor.num_bytes / self._total
            waited = max(waited, arrived - tensor.needed)
        return self._cost.forward + waited
