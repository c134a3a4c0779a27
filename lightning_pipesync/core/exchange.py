"""One collective operation on many tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pipesync.core.buckets import Bucket, Fusion, plan_buckets
from lightning_pipesync.core.handle import Handle
from lightning_pipesync.core.parameters import NamedParameter

#: Buckets in flight at a time in :func:`exchange_fused`: so much memory it needs besides the tensors.
IN_FLIGHT = 2


@torch.no_grad()
def exchange_fused(tensors: Sequence[Tensor], bucket_mb: float, start: Callable[[Tensor], Handle[Any]]) -> None:
    """Replaces ``tensors`` by what a collective operation makes of them, fused into buffers that are freed at once.

    Args:
        tensors: of any dtypes and devices, the same on all ranks.
        bucket_mb: MiB that travel in one piece.
        start: the operation, in place on a flat buffer.
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
