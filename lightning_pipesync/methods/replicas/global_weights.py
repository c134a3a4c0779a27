"""The global weights, and the outer step from them towards the average of the replicas (DiLoCo, SlowMo)."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipesync.core.codecs import Codec
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.feedback import ErrorFeedback
from lightning_pipesync.core.torch_private import map_tensors
from lightning_pipesync.methods.replicas.groups import ReplicaGroups

#: Returns an optimizer of some tensors.
MakeOptimizer = Callable[[list[Tensor]], Optimizer]


class OuterStep:
    """Updates global weights, or this rank's shards of them, by an element-wise optimizer, which ``make`` returns.

    The outer gradient is the global weights minus the average of the replicas (DiLoCo, arXiv 2311.08105, Algorithm 1,
    lines 12 to 14), so that SGD with a learning rate of 1 sets the global weights to that average.
    """

    def __init__(self, shards: Sequence[Tensor], make: MakeOptimizer) -> None:
        self._shards = list(shards)
        self._optimizers = [make([shard]) for shard in self._shards]

    @torch.no_grad()
    def step(self, index: int, movement: Tensor) -> Tensor:
        """Updates a shard, and returns it; ``movement`` is the replicas' average minus the global weights.

        ``movement`` is not to be used afterwards.
        """
        shard = self._shards[index]
        shard.grad = movement.neg_()
        self._optimizers[index].step()
        shard.grad = None
        return shard

    def state_of(self, index: int) -> Any:
        return self._optimizers[index].state_dict()["state"]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for optimizer, saved in zip(self._optimizers, state["states"], strict=True):
            optimizer.load_state_dict({"state": saved, "param_groups": optimizer.state_dict()["param_groups"]})


@dataclass(frozen=True)
class _Before:
    """A rank's shard of a bucket's global values, where it begins, and its outer state, before an outer step.

    Copied when the average starts, on the thread and stream of the training: on a GPU the outer step runs on another.
    """

    offset: int
    shard: Tensor
    outer_state: Any


class GlobalWeights:
    """The values of each bucket that all ranks had after the last average, and how the next one changes them.

    Lossy codecs encode the difference to them, never the weights themselves, and the outer step needs the same
    difference. Without either, the average itself is enough: then ``flats``, the fused values, may be empty.

    Each rank takes the outer step on its shard of the average, before it is gathered. If the codec's wires are gathered
    (:attr:`Codec.gathered`), each rank has all of the average, and takes all of the step.

    Args:
        residual_decay: the factor on the residuals of a codec before the next differences are added.
    """

    def __init__(
        self,
        replicas: Transport | ReplicaGroups,
        buckets: Sequence[Tensor],
        codec: Codec,
        error_feedback: bool,
        outer: MakeOptimizer | None,
        residual_decay: float = 1.0,
    ) -> None:
        self.flats = [torch.zeros_like(flat) for flat in buckets]
        self._replicas, self._codec = replicas, codec
        self._sends_differences = outer is not None or not codec.lossless
        sums = replicas.encodes_sums(codec)
        self._feedback = [replicas.feedback(flat, gathered=sums) for flat in buckets] if error_feedback else []
        self._residual_decay = residual_decay
        self._before: dict[int, _Before] = {}  # of averages under way
        own = self.flats if codec.gathered else [replicas.shard(flat) for flat in self.flats]
        self._outer = OuterStep(own, outer) if outer else None

    @property
    def has_outer_step(self) -> bool:
        """Whether each rank has the outer state of its shards."""
        return self._outer is not None and not self._codec.gathered

    def subtract_from(self, index: int, flat: Tensor) -> None:
        """Replaces values of a bucket by the difference to the global ones."""
        if self._sends_differences:
            flat.sub_(self.flats[index])

    def drop_residuals(self) -> None:
        """Forgets what was not sent of the weights before others were loaded."""
        for feedback in self._feedback:
            feedback.decay(0.0)

    def feedback(self, index: int) -> ErrorFeedback | None:
        """Returns the residuals of a bucket's codec for the next average, which they have decayed for."""
        if not self._feedback:
            return None
        self._feedback[index].decay(self._residual_decay)
        return self._feedback[index]

    def shard_hook(self, index: int, count: int | None) -> Callable[[Tensor], object] | None:
        """Returns what changes this rank's shard of a bucket's average, or of a sum that ``count`` divides.

        Called when that average starts.
        """
        if self._codec.gathered or not (self._outer or count):
            return None
        before = None
        if self._outer:
            flat, own = self.flats[index], self._own(index)
            offset, before = int(own.storage_offset() - flat.storage_offset()), own.clone()
            self._before[index] = _Before(offset, before, map_tensors(Tensor.clone, self._outer.state_of(index)))
        return partial(self._outer_step, index, count, before)

    @torch.no_grad()
    def update(self, index: int, flat: Tensor) -> None:
        """Sets them to the average in ``flat``; with a lossy codec that is a difference, and becomes the average."""
        self._before.pop(index, None)
        if self.flats and self._codec.lossless:
            self.flats[index].copy_(flat)
        elif self.flats and self._outer and self._codec.gathered:
            flat.copy_(self._outer.step(index, flat))
        elif self.flats:
            flat.copy_(self.flats[index].add_(flat))

    def agreed(self, index: int) -> Tensor:
        """Returns a copy of a bucket's values that all ranks agree on: not what an average under way has changed."""
        flat, before = self.flats[index], self._before.get(index)
        if before is None:
            return flat.clone()
        end = before.offset + before.shard.numel()
        return torch.cat([flat[: before.offset], before.shard, flat[end:]])

    def snapshot(self, buckets: Container[int] | None = None) -> dict[str, Any]:
        """Returns, on the CPU, the global values and the outer states that all ranks agree on.

        Args:
            buckets: those with a copy; the others have None. None: all.
        """
        if not self.flats:
            return {}
        copied = [index if buckets is None or index in buckets else None for index in range(len(self.flats))]
        values = [None if index is None else self.agreed(index).cpu() for index in copied]
        if self._outer is None:
            return {"common": values, "outer": {}}
        states = [None if index is None else self._agreed_state(index) for index in copied]
        return {"common": values, "outer": {"states": states}}

    def state_dict(self) -> dict[str, Any]:
        """Returns the :meth:`snapshot`, and the codec's residuals."""
        feedback = {"feedback": [feedback.state_dict() for feedback in self._feedback]} if self.flats else {}
        return {**self.snapshot(), **feedback}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self.flats or "common" not in state:
            return
        self._before.clear()
        for flat, values in zip(self.flats, state["common"], strict=True):
            flat.copy_(values)
        if self._outer:
            self._outer.load_state_dict(state["outer"])
        if "feedback" in state:
            for feedback, residuals in zip(self._feedback, state["feedback"], strict=True):
                feedback.load_state_dict(residuals)

    @torch.no_grad()
    def _outer_step(self, index: int, count: int | None, before: Tensor | None, shard: Tensor) -> None:
        """Replaces this rank's shard of a sum by what all ranks gather: values, or with a lossy codec a difference.

        ``before`` has the global values of the shard, with an outer step.
        """
        if count is not None:
            shard.div_(count)
        if self._outer is None or before is None:
            return
        own = self._own(index)
        stepped = self._outer.step(index, shard.to(own.device))
        if self._codec.lossless:
            shard.copy_(stepped)
        else:  # all ranks, this one too, add the decoded difference to the global weights
            difference = stepped - before
            own.copy_(before)
            shard.copy_(difference)  # last: the copy may make the host wait

    def _own(self, index: int) -> Tensor:
        """Returns this rank's shard of a bucket's global values."""
        return self._replicas.shard(self.flats[index])

    def _agreed_state(self, index: int) -> Any:
        """Returns a copy on the CPU of the outer state of this rank's shard of a bucket."""
        assert self._outer is not None
        state = self._before[index].outer_state if index in self._before else self._outer.state_of(index)
        return map_tensors(lambda tensor: tensor.to("cpu", copy=True), state)
