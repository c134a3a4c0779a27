"""What is done to lists of tensors, whosever they are."""

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


def can_be_averaged(tensor: Tensor) -> bool:
    """Returns whether the values are real numbers of 16 bits or more. 8-bit floats are codes, as integers may be."""
    return tensor.is_floating_point() and tensor.element_size() > 1


def to_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns copies on the CPU."""
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
