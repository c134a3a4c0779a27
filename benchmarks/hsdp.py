"""What is compared between replicas that FSDP2 shards: methods, and FSDP2 on both dimensions of the mesh (HSDP).

On a CPU the all-reduces of HSDP are also run under the backward pass, as DDP's and as FSDP2's on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_pipesync.core.buckets import Bucket, Fusion, plan_buckets
from lightning_pipesync.core.dtensors import local_of
from lightning_pipesync.core.parameters import NamedParameter, hook_gradient
from lightning_pipesync.lab.bench.benchmark import Benchmark
from lightning_pipesync.lab.bench.candidates import Candidate, MakeCandidate, Trainable, hsdp, makers, sharded
from lightning_pipesync.lab.bench.models import BenchModel, model_names

ALONE = "no communication between hosts"


@dataclass(frozen=True, kw_only=True)
class ReplicasBenchmark(Benchmark):
    """A benchmark of replicas that FSDP2 shards within hosts, with methods between hosts, beside HSDP.

    Attributes:
        ranks_per_replica: Neighboring ranks among which FSDP2 shards a replica: those of a host.
        methods: What is compared with FSDP2 on a mesh of both dimensions: methods, each with settings if need be, as
            in ``bench step``.
        bucket_mb: Bucket sizes in MiB of methods whose settings choose none, and of HSDP with overlap.
        reshard: Whether FSDP2 frees the weights of a layer after its forward pass, and gathers them again.
    """

    model: str
    ranks_per_replica: int = 2
    methods: tuple[str, ...]
    bucket_mb: tuple[float, ...] = (2.0,)
    reshard: bool = False

    def __post_init__(self) -> None:
        if self.model not in model_names():
            raise ValueError(f"model={self.model!r} is not known; there are {', '.join(model_names())}.")
        if self.ranks_per_replica < 2:
            raise ValueError(f"ranks_per_replica must be at least 2, got {self.ranks_per_replica!r}.")
        self._check_all_positive("bucket_mb", self.bucket_mb, "numbers of MiB")
        makers(self.methods, self.bucket_mb)  # raises if one is unknown
        super().__post_init__()

    @property
    def num_candidates(self) -> int:
        return 2 + len(self.bucket_mb) + len(makers(self.methods, self.bucket_mb))

    def makers(self, mesh: DeviceMesh) -> list[MakeCandidate]:
        """Returns factories of what is compared on the mesh; :data:`ALONE` and :data:`HSDP` are the first."""
        shards, replicas = mesh["shards"], mesh["replicas"]

        def in_shards(make: MakeCandidate, model: BenchModel) -> Candidate:
            return make(sharded(model, shards, self.reshard))

        methods: list[MakeCandidate] = [lambda model: Trainable(ALONE, model, model.module, "compute")]
        methods += [partial(OverlappedHSDP, replicas=replicas, bucket_mb=size) for size in self.bucket_mb]
        methods += makers(self.methods, self.bucket_mb, replicas=replicas)
        made = [partial(in_shards, make) for make in methods]
        return [made[0], lambda model: hsdp(sharded(model, mesh, self.reshard)), *made[1:]]


@dataclass
class _Reduction:
    """The all-reduce of a bucket: ``missing`` gradients are not ready yet, and then it is in flight."""

    parameters: list[Tensor]
    bucket: Bucket
    missing: int = 0
    work: dist.Work | None = None


class OverlappedHSDP(Trainable):
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
