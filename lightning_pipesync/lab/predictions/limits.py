"""The shortest time of a training step by the papers, with equal layers, or with those of a model.

Eqs. 7 and 8 of DeAR know no single tensors. But a gradient cannot be sent before it is ready, and a layer cannot run
before its weights are there: BERT's embeddings, a fifth of its values, are the last to be ready and the first to be
needed. With ``tensors`` the limits are those of tensors that are sent one by one, without latency, in the best order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np


@dataclass(frozen=True)
class LayerTimes:
    """When a tensor's gradient is ready and when it is needed."""

    ready: float  # seconds since backward began
    needed: float  # seconds of computation since forward began
    num_bytes: int
    shape: Sequence[int] = ()  # of this rank's part of the tensor; empty if unknown


@dataclass(frozen=True)
class StepCost:
    """The parts of a training step, in seconds, and its duration when everything overlaps that can."""

    forward: float  # t_ff
    backward: float  # t_bp
    update: float  # the optimizer step, which overlaps with nothing
    reduce_scatter: float  # t_rs of the whole gradient
    all_gather: float  # t_ag of the whole gradient
    tensors: Sequence[LayerTimes] = ()  # that are communicated; empty: many equal ones

    def compressed(self, ratio: float) -> StepCost:
        return replace(self, reduce_scatter=self.reduce_scatter / ratio, all_gather=self.all_gather / ratio)

    @property
    def compute(self) -> float:
        """A step without communication."""
        return self.forward + self.backward + self.update

    @property
    def all_reduce(self) -> float:
        """t_ar."""
        return self.reduce_scatter + self.all_gather

    @property
    def ratio(self) -> float:
        """Communication over computation."""
        return self.all_reduce / (self.forward + self.backward)

    @property
    def serial(self) -> float:
        """The all-reduce hidden under nothing."""
        return self.compute + self.all_reduce

    @property
    def under_forward(self) -> float:
        """The all-reduce after the update, hidden under the next forward pass."""
        return self.backward + self._forward(self.all_reduce) + self.update

    @property
    def baseline(self) -> float:
        """The all-reduce hidden under backward: DDP at its best (DeAR, Eq. 8)."""
        return self.forward + self._backward(self.all_reduce) + self.update

    @property
    def reduce_scatter_only(self) -> float:
        """A step of DeAR without all-gathers (Fig. 8)."""
        return self.forward + self._backward(self.reduce_scatter) + self.update

    @property
    def all_gather_only(self) -> float:
        """A step of DeAR without reduce-scatters (Fig. 8)."""
        return self._forward(self.all_gather) + self.backward + self.update

    @property
    def two_halves(self) -> float:
        """The two halves hidden under backward and forward: DeAR at its best (Eq. 7)."""
        return self._forward(self.all_gather) + self._backward(self.reduce_scatter) + self.update

    @property
    def eager(self) -> float:
        """The two halves hidden under the whole step: the least of exact synchronous SGD, but for what the last
        reduce-scatter and the first all-gather leave bare.

        A tensor that is ready after ``r`` and needed before ``n`` is reduced and gathered after ``r`` and before ``n``.
        """
        limit = max(self.forward + self.backward, self.all_reduce)
        in_order = sorted(self.tensors, key=lambda tensor: tensor.needed)
        needed, ready = (np.array([getattr(tensor, name) for tensor in in_order]) for name in ("needed", "ready"))
        seconds = np.array(self._seconds_of(in_order, self.all_reduce))
        for r in np.unique(ready):
            ends = r + np.cumsum(np.where(ready >= r, seconds, 0.0)) + self.forward - needed
            limit = max(limit, float(np.max(ends)))
        return limit + self.update

    @property
    def under_next_step(self) -> float:
        """The all-reduce hidden under the whole next step (Pipe-SGD, timing model with limited resources)."""
        return max(self.compute, self.all_reduce)

    def max_speedup(self, world_size: int) -> float:
        """Returns S_max, the speed-up of DeAR on ``world_size`` ranks over one (Eq. 6), if the update takes no time."""
        compute = self.forward + self.backward
        hidden = min(self.reduce_scatter, self.backward) + min(self.all_gather, self.forward)
        return world_size * compute / (compute + self.all_reduce - hidden)

    def _backward(self, seconds: float) -> float:
        """Returns when all gradients are reduced, since backward began; their operation takes ``seconds`` in all."""
        in_order = sorted(self.tensors, key=lambda tensor: tensor.ready)
        reduced = end_of_pipeline([tensor.ready for tensor in in_order], self._seconds_of(in_order, seconds))
        return max(self.backward, seconds, reduced)

    def _forward(self, seconds: float) -> float:
        """Returns when forward ends, if an operation of ``seconds`` on all weights begins with it."""
        in_order = sorted(self.tensors, key=lambda tensor: tensor.needed)
        arrived = accumulate(self._seconds_of(in_order, seconds))
        waited = max((end - tensor.needed for end, tensor in zip(arrived, in_order, strict=True)), default=0.0)
        return max(self.forward, seconds, self.forward + waited)

    def _seconds_of(self, tensors: Sequence[LayerTimes], seconds: float) -> list[float]:
        """Returns the share of each of ``tensors`` in an operation of ``seconds`` on all of them."""
        total = sum(tensor.num_bytes for tensor in tensors)
        return [seconds * tensor.num_bytes / total for tensor in tensors]


def end_of_pipeline(ready: Sequence[float], durations: Sequence[float]) -> float:
    """Returns when the last of several serial operations ends, each of which starts once it is ready.

    For the times at which DDP's buckets become ready in backward, and the durations of their all-reduces, this is when
    all gradients are reduced: Eq. 8 with buckets of finite size and cost.
    """
    end = 0.0
    for start, duration in zip(ready, durations, strict=True):
        end = max(end, start) + duration
    return end
