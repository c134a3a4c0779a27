"""The parameters of which every rank trains its own replica, and their average over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_pipesync.core.buckets import Bucket
from lightning_pipesync.core.codecs import Codec, get_codec
from lightning_pipesync.core.feedback import ErrorFeedback
from lightning_pipesync.core.handle import Handle
from lightning_pipesync.core.transport import Transport
from lightning_pipesync.methods.replicas.outer import OuterStep


class ReplicatedTensors:
    """Averages tensors over the ranks, with all buckets in flight at the same time.

    Args:
        buckets: tensors of each bucket, floating-point, of one dtype on one device, the same on all ranks.
        transport: the way to the other ranks.
        codec: of :meth:`synchronize`.
        error_feedback: whether the error of a lossy codec is added to what is sent next.
        outer_step: learning rate and momentum of the outer step of :meth:`synchronize`; None: the plain average.

    Attributes:
        tensors: those of each bucket.
        diverged: whether the replicas may differ, the same on all ranks; set by the owner after a local step.
    """

    def __init__(
        self,
        buckets: Sequence[list[Tensor]],
        transport: Transport,
        codec: str | Codec = "none",
        error_feedback: bool = False,
        outer_step: tuple[float, float] | None = None,
    ) -> None:
        self.tensors = list(buckets)
        self._transport = transport
        self._codec = get_codec(codec)
        self._own: list[Bucket] = []
        self._swapped_in = False
        self.diverged = False
        # Lossy codecs encode how far the weights moved since the last synchronized step, never the weights
        # themselves. The outer step needs the same difference.
        self._common: list[Tensor] = []
        self._feedback: list[ErrorFeedback | None] = []
        if outer_step or not self._codec.lossless:
            for bucket, tensors in zip(self._buckets, self.tensors, strict=True):
                bucket.pack(tensors)
                self._common.append(bucket.flat.clone())
            self._feedback = [transport.feedback(b.flat) if error_feedback else None for b in self._buckets]
        self._outer = OuterStep(self._common, *(outer_step or (1.0, 0.0)))

    @cached_property
    def _buckets(self) -> list[Bucket]:
        return [Bucket(tensors) for tensors in self.tensors]

    def average(self) -> None:
        """Sets the tensors to their exact average over the ranks; a collective call."""
        handles = []
        for bucket, tensors in zip(self._buckets, self.tensors, strict=True):
            bucket.pack(tensors)
            handles.append(self._transport.all_reduce(bucket.flat, mean=True))
        for handle, bucket, tensors in zip(handles, self._buckets, self.tensors, strict=True):
            handle.wait()
            bucket.unpack(tensors)
        self.diverged = False

    def synchronize(self) -> None:
        """Sets the tensors to their average over the ranks, by way of the codec and the outer step; collective."""
        for index, handle in enumerate([self.start(index) for index in range(len(self.tensors))]):
            handle.wait()
            self.finish(index)
        self.diverged = False

    def start(self, index: int) -> Handle[Tensor]:
        """Starts to average a bucket, by way of the codec; a collective call. :meth:`finish` sets its tensors."""
        bucket = self._buckets[index]
        bucket.pack(self.tensors[index])
        if not self._common:
            return self._transport.all_reduce(bucket.flat, mean=True)
        bucket.flat.sub_(self._common[index])
        return self._transport.all_reduce(bucket.flat, codec=self._codec, mean=True, feedback=self._feedback[index])

    def finish(self, index: int, _: object = None) -> None:
        """Takes the outer step, and sets the tensors of a bucket whose average has arrived."""
        bucket = self._buckets[index]
        if self._common:
            self._outer.step(index, bucket.flat)
            bucket.flat.copy_(self._common[index])
        bucket.unpack(self.tensors[index])

    def swap_in_average(self) -> None:
        """Calls :meth:`average`, and keeps this rank's own values for :meth:`swap_back`; nothing if none diverged."""
        if self._swapped_in or not self.diverged:
            return
        self._own = self._own or [Bucket(tensors) for tensors in self.tensors]
        for own, tensors in zip(self._own, self.tensors, strict=True):
            own.pack(tensors)
        self.average()
        self._swapped_in = True

    @torch.no_grad()
    def swap_back(self) -> None:
        """Restores this rank's own values, except those of tensors that were written to since the swap."""
        if not self._swapped_in:
            return
        for own, average, tensors in zip(self._own, self._buckets, self.tensors, strict=True):
            written = differing(tensors, average.views)
            for tensor, value, keep in zip(tensors, own.views, written, strict=True):
                if not keep:
                    tensor.copy_(value)
        self._swapped_in = False
        self.diverged = True

    def keep_average(self) -> None:
        """Drops the values that :meth:`swap_in_average` kept: training continues from the average."""
        self._swapped_in = False

    def state_dict(self) -> dict[str, Any]:
        """Returns, on the CPU, this rank's own values if they differ, and what the codec and the outer step need."""
        state: dict[str, Any] = {}
        if self._swapped_in:
            state["own"] = [to_cpu(bucket.views) for bucket in self._own]
        elif self.diverged:
            state["own"] = [to_cpu(tensors) for tensors in self.tensors]
        if self._common:
            state["common"] = to_cpu(self._common)
            state["feedback"] = [feedback.state_dict() for feedback in self._feedback if feedback is not None]
            state["outer"] = self._outer.state_dict()
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from what :meth:`state_dict` returned on this rank."""
        self.diverged = "own" in state
        self._swapped_in = False
        for values, tensors in zip(state.get("own", []), self.tensors, strict=False):
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
        if self._common and "common" in state:
            for common, value in zip(self._common, state["common"], strict=True):
                common.copy_(value)
            kept = [feedback for feedback in self._feedback if feedback is not None]
            for feedback, residuals in zip(kept, state["feedback"], strict=True):
                feedback.load_state_dict(residuals)
            self._outer.load_state_dict(state["outer"])


def differing(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> list[bool]:
    """Returns for each pair of tensors on one device whether their shapes or bits differ; a NaN equals itself."""
    if not tensors:
        return []
    differ = [
        (_bits(tensor) != _bits(other)).any()
        if tensor.shape == other.shape
        else torch.ones((), dtype=torch.bool, device=tensor.device)
        for tensor, other in zip(tensors, others, strict=True)
    ]
    result: list[bool] = torch.stack(differ).tolist()  # the host waits for the device once, not for each
    return result


def to_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns copies on the CPU."""
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
