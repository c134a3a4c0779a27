"""A collective on many tensors, fused into buckets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipesync.core.buckets import Bucket, Fusion, plan_buckets
from lightning_pipesync.core.comm.handle import Handle
from lightning_pipesync.core.parameters import NamedParameter

#: Buckets in flight at a time in :func:`exchange_fused`, which bounds its additional memory.
IN_FLIGHT = 2


def broadcast_fused(tensors: Sequence[Tensor], bucket_mb: float, group: dist.ProcessGroup | None = None) -> None:
    """Copies the first rank's ``tensors`` to the others of a group of torch's, by default all; as exchange_fused."""

    def start(flat: Tensor) -> Handle[Any]:
        return Handle(dist.broadcast(flat, group=group, group_src=0, async_op=True).wait)

    exchange_fused(tensors, bucket_mb, start)


@torch.no_grad()
def exchange_fused(tensors: Sequence[Tensor], bucket_mb: float, start: Callable[[Tensor], Handle[Any]]) -> None:
    """Runs a collective, which ``start`` starts in place, on ``tensors``, fused into temporary buckets.

    The tensors may be of any dtypes and devices, the same on all ranks. A bucket has at most ``bucket_mb`` MiB.
    """
    named = [NamedParameter("", tensor, "", None) for tensor in tensors]
    pending: deque[tuple[Handle[Any], Bucket, list[Tensor]]] = deque()

    def finish_oldest() -> None:
        handle, bucket, members = pending.popleft()
        handle.wait()
        bucket.unpack(members)

    for plan in plan_buckets(named, Fusion(bucket_mb=bucket_mb)):
        if len(pending) == IN_FLIGHT:
            finish_oldest()
        members = [parameter.tensor for parameter in plan]
        bucket = Bucket(members)
        bucket.pack(members)
        pending.append((start(bucket.flat), bucket, members))
    while pending:
        finish_oldest()
