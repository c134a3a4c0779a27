"""The buckets of Pipe-SGD's gradients, and their buffers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from lightning_pipesync.core.buckets import MIB, Bucket, Fusion, num_bytes, plan_buckets
from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.methods.pipe_sgd.config import PipeSGDConfig

#: Bytes of a piece that each rank sums: so much that messages are large, and so little that one half of an all-reduce
#: of a large buffer overlaps with the other half.
SHARD_OF_PIECE = 4 * MIB


class GradientPlan:
    """How the gradients of some parameters are fused, step after step.

    Args:
        parameters: in the order of registration.
        config: the settings.
        transport: the way to the other ranks.

    Attributes:
        config: the settings.
        buckets: the parameters of each bucket, in the order in which their gradients are expected.
        members: all parameters, bucket by bucket.
        place: by the id of a parameter the index of its bucket.
        compared: which parameters, bucket by bucket, had a gradient when the ranks last compared: on this rank, on any.
        codec: of the all-reduce.
        feedback: the residuals of each piece of each bucket; None without error feedback.
    """

    def __init__(self, parameters: Sequence[NamedParameter], config: PipeSGDConfig, transport: Transport) -> None:
        self.config = config
        ready_order = [replace(parameter, group=None) for parameter in reversed(parameters)]
        if config.pipeline_level == 1:
            self.buckets = plan_buckets(ready_order, Fusion(bucket_mb=config.bucket_mb or math.inf))
        else:
            segments = _segments(ready_order, config.segments)
            self.buckets = [b for part in segments for b in plan_buckets(part, Fusion(bucket_mb=math.inf))]
        self.members = [member for members in self.buckets for member in members]
        self.place = {id(member.tensor): index for index, members in enumerate(self.buckets) for member in members}
        self.compared = [True] * len(parameters), [True] * len(parameters)
        self.codec = get_codec(config.compression)
        self._world_size = transport.world_size
        self._free: list[list[Bucket]] = [self._new_buffers()]
        self.feedback = [
            [transport.feedback(piece) if config.uses_error_feedback else None for piece in self.pieces(bucket)]
            for bucket in self._free[0]
        ]

    def pieces(self, bucket: Bucket) -> Sequence[Tensor]:
        """Returns views of a bucket, each of which has its own all-reduce."""
        numel = SHARD_OF_PIECE * self._world_size // bucket.flat.element_size()
        return bucket.flat.split(numel)

    def acquire_buffers(self) -> list[Bucket]:
        """Returns a buffer for each bucket, with undefined content."""
        return self._free.pop() if self._free else self._new_buffers()

    def release_buffers(self, buffers: list[Bucket]) -> None:
        """Makes the buffers of :meth:`acquire_buffers` available again."""
        self._free.append(buffers)

    def _new_buffers(self) -> list[Bucket]:
        return [Bucket([member.tensor for member in members]) for members in self.buckets]


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
