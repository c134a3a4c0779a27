"""How Pipe-SGD fuses gradients, and the buckets of those in flight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from lightning_pipesync.core.buckets import MIB, Fusion, num_bytes, plan_buckets
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.feedback import ErrorFeedback
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.methods.gradients.bucket import GradientBucket
from lightning_pipesync.methods.gradients.low_rank import low_rank_bucket, low_rank_gradients
from lightning_pipesync.methods.pipe_sgd.config import PipeSGDConfig

#: Bytes of a piece that each rank sums: so much that messages are large, and so little that one half of an all-reduce
#: of a large buffer overlaps with the other half.
SHARD_OF_PIECE = 4 * MIB


class GradientLayout:
    """How the gradients of some parameters are fused, step after step.

    ``members`` are these, bucket by bucket, in the order in which their gradients are expected. ``compared`` is, by
    member, whether it had a gradient when the ranks last compared: on this rank, on any. ``low_rank`` are the
    factorized gradients, which those of several steps share; None without.
    """

    def __init__(self, parameters: Sequence[NamedParameter], config: PipeSGDConfig, transport: Transport) -> None:
        self.config, self._transport = config, transport
        ready_order = [replace(parameter, group=None) for parameter in reversed(parameters)]
        if config.pipeline_level == 1:
            self._members_of = plan_buckets(ready_order, Fusion(bucket_mb=config.bucket_mb or math.inf))
        else:
            segments = _segments(ready_order, config.segments)
            self._members_of = [b for part in segments for b in plan_buckets(part, Fusion(bucket_mb=math.inf))]
        self.members = [member for members in self._members_of for member in members]
        self.index_of = {id(m.tensor): index for index, members in enumerate(self._members_of) for m in members}
        self.compared = [True] * len(parameters), [True] * len(parameters)
        self.low_rank = low_rank_gradients(parameters, config)
        tensors = [[member.tensor for member in members] for members in self._members_of]
        self._factorized = [low_rank_bucket(self.low_rank, each, transport.world_size) for each in tensors]
        first = self._new_buckets()
        if config.uses_error_feedback:
            for bucket in first:
                bucket.use_error_feedback()
        self._feedback = [bucket.feedback for bucket in first]
        self._free = [first]

    @property
    def feedback(self) -> list[ErrorFeedback]:
        """The residuals of each piece, which gradients of several steps share; empty without error feedback."""
        return [feedback for of_bucket in self._feedback for feedback in of_bucket if feedback is not None]

    def acquire_buckets(self) -> list[GradientBucket]:
        """Returns a bucket for each part, with undefined content."""
        if self._free:
            return self._free.pop()
        buckets = self._new_buckets()
        for bucket, feedback in zip(buckets, self._feedback, strict=True):
            bucket.feedback = feedback
        return buckets

    def release_buckets(self, buckets: list[GradientBucket]) -> None:
        self._free.append(buckets)

    def _new_buckets(self) -> list[GradientBucket]:
        buckets = []
        for number, members in enumerate(self._members_of):
            tensors = [member.tensor for member in members]
            piece_numel = SHARD_OF_PIECE * self._transport.world_size // tensors[0].element_size()
            args = (tensors, self._transport, self.config.compression, piece_numel, number, self._factorized[number])
            buckets.append(GradientBucket(*args))
        return buckets


def _segments(parameters: Sequence[NamedParameter], number: int) -> list[list[NamedParameter]]:
    """Divides parameters into at most ``number`` segments of about the same size."""
    total, passed = sum(num_bytes(parameter) for parameter in parameters), 0
    segments: list[list[NamedParameter]] = []
    for parameter in parameters:
        size = num_bytes(parameter)
        if passed + size / 2 >= total * len(segments) / number:  # most of it is beyond the segments so far
            segments.append([])
        segments[-1].append(parameter)
        passed += size
    return segments
