"""HSDP whose all-reduces between replicas run under the backward pass, as DDP's and as FSDP2's on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_pipesync.core.buckets import Bucket, Fusion, plan_buckets
from lightning_pipesync.core.dtensors import local_of
from lightning_pipesync.core.parameters import NamedParameter, hook_gradient
from lightning_pipesync.lab.bench.candidates import Wrapped
from lightning_pipesync.lab.bench.models import BenchModel


@dataclass
class _Reduction:
    """The all-reduce of a bucket: ``missing`` gradients are not ready yet, and then it is in flight."""

    parameters: list[Tensor]
    bucket: Bucket
    missing: int = 0
    work: dist.Work | None = None


class OverlappedHSDP(Wrapped):
    """FSDP2 within each replica, and all-reduces of fused gradients between replicas, each once its bucket is full.

    On a CPU FSDP2's own all-reduce of each layer stops the backward pass, which it does not on a GPU. No method is to
    gain by that.
    """

    def __init__(self, model: BenchModel, replicas: DeviceMesh, bucket_mb: float) -> None:
        super().__init__(f"HSDP with overlap, {bucket_mb:g} MiB", model, model.module, "baseline")
        self._group = replicas.get_group()
        members = [NamedParameter(name, local_of(p), "", (0, 0)) for name, p in model.module.named_parameters()]
        fused = plan_buckets(members[::-1], Fusion(bucket_mb=bucket_mb))
        by_bucket = [[member.tensor for member in bucket] for bucket in fused]
        self._reductions = [_Reduction(tensors, Bucket(tensors)) for tensors in by_bucket]
        for reduction in self._reductions:
            reduction.missing = len(reduction.parameters)
            for parameter in reduction.parameters:
                hook_gradient(parameter, lambda _, reduction=reduction: self._is_ready(reduction))  # type: ignore[misc]

    def _is_ready(self, reduction: _Reduction) -> None:
        reduction.missing -= 1
        if not reduction.missing:
            reduction.bucket.pack_gradients(reduction.parameters)
            reduction.work = dist.all_reduce(reduction.bucket.flat, group=self._group, async_op=True)

    def update(self) -> None:
        for reduction in self._reductions:
            assert reduction.work is not None
            reduction.work.wait()
            reduction.bucket.flat.div_(self._group.size())
            for parameter, average in zip(reduction.parameters, reduction.bucket.views, strict=True):
                assert parameter.grad is not None
                parameter.grad.copy_(average)
            reduction.missing, reduction.work = len(reduction.parameters), None
        super().update()
