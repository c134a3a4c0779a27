"""Gradient aggregation: a synchronized step averages the gradients before the update (SelSync, Section III-C)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pipesync.core.buckets import Bucket
from lightning_pipesync.core.codecs import Codec, get_codec
from lightning_pipesync.core.collectives import Collectives
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
            self._add_missing()
        handles = []
        for bucket, parameters, feedback in zip(self._buckets, self._parameters, self._feedback, strict=True):
            bucket.pack_gradients(parameters)
            handles.append(self._collectives.all_reduce(bucket.flat, codec=self._codec, mean=True, feedback=feedback))
        for handle, bucket, parameters in zip(handles, self._buckets, self._parameters, strict=True):
            handle.wait()
            pairs = [(p.grad, v) for p, v in zip(parameters, bucket.views, strict=True) if p.grad is not None]
            foreach_copy_([gradient for gradient, _ in pairs], [view for _, view in pairs])

    def state_dict(self) -> dict[str, Any]:
        """Returns the residuals of the codec."""
        return {"feedback": [feedback.state_dict() for feedback in self._feedback if feedback is not None]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from what :meth:`state_dict` returned on this rank."""
        kept = [feedback for feedback in self._feedback if feedback is not None]
        for feedback, residuals in zip(kept, state["feedback"], strict=True):
            feedback.load_state_dict(residuals)

    def _add_missing(self) -> None:
        """Sets gradients to zero that another rank has and this one has not."""
        parameters = [parameter for bucket in self._parameters for parameter in bucket]
        somewhere = self._collectives.union([parameter.grad is not None for parameter in parameters]).wait()
        for parameter, present in zip(parameters, somewhere, strict=True):
            if present and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
