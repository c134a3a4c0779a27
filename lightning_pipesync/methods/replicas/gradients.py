"""Gradient aggregation: a synchronized step averages the gradients before the update (SelSync, Section III-C)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pipesync.core.buckets import Bucket
from lightning_pipesync.core.codecs import Codec, get_codec
from lightning_pipesync.core.comm.collectives import Collectives
from lightning_pipesync.core.comm.handle import Handle
from lightning_pipesync.core.torch_private import foreach_copy_


class GradientAggregation:
    """Averages the gradients of parameters over the ranks, with all buckets in flight at the same time.

    Args:
        buckets: parameters of each bucket, of one dtype on one device.
        collectives: the way to the ranks that average them.
        codec: of the all-reduce.
        error_feedback: whether the error of a lossy codec is added to what is sent next.
    """

    def __init__(
        self, buckets: Sequence[list[Tensor]], collectives: Collectives, codec: str | Codec, error_feedback: bool
    ) -> None:
        self._parameters = list(buckets)
        self._collectives = collectives
        self._codec = get_codec(codec)
        self._buckets = [Bucket(parameters) for parameters in self._parameters]
        self._feedback = [collectives.feedback(bucket.flat) if error_feedback else None for bucket in self._buckets]

    @torch.no_grad()
    def average(self, some_missing: bool) -> None:
        """Replaces every gradient by its average over the ranks.

        Args:
            some_missing: whether some rank has a parameter without a gradient, the same on all ranks. A missing
                gradient counts as zero. A gradient that no rank has stays None, as in DDP.
        """
        if some_missing:
            self.add_missing()
        handles = []
        for index in range(len(self._buckets)):
            self.pack(index)
            handles.append(self.start(index))
        for index, handle in enumerate(handles):
            handle.wait()
            self.unpack(index)

    def pack(self, index: int) -> None:
        """Copies the gradients of a bucket, zeros for missing ones."""
        self._buckets[index].pack_gradients(self._parameters[index])

    def start(self, index: int) -> Handle[Tensor]:
        """Starts to average what :meth:`pack` has copied."""
        flat, feedback = self._buckets[index].flat, self._feedback[index]
        return self._collectives.all_reduce(flat, codec=self._codec, mean=True, feedback=feedback)

    @torch.no_grad()
    def unpack(self, index: int) -> None:
        """Replaces the gradients of a bucket by their average, once it has arrived; a missing one stays None."""
        pairs = zip(self._parameters[index], self._buckets[index].views, strict=True)
        present = [(p.grad, view) for p, view in pairs if p.grad is not None]
        foreach_copy_([gradient for gradient, _ in present], [view for _, view in present])

    def add_missing(self) -> None:
        """Sets gradients to zero that another rank has and this one has not; a collective call."""
        parameters = [parameter for bucket in self._parameters for parameter in bucket]
        somewhere = self._collectives.union([parameter.grad is not None for parameter in parameters]).wait()
        for parameter, present in zip(parameters, somewhere, strict=True):
            if present and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def state_dict(self) -> dict[str, Any]:
        """Returns the residuals of the codec."""
        return {"feedback": [feedback.state_dict() for feedback in self._feedback if feedback is not None]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from what :meth:`state_dict` returned on this rank."""
        kept = [feedback for feedback in self._feedback if feedback is not None]
        for feedback, residuals in zip(kept, state["feedback"], strict=True):
            feedback.load_state_dict(residuals)
