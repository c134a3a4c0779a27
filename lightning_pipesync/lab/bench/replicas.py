"""What is compared between replicas that FSDP2 shards: methods, and FSDP2 on both dimensions of the mesh (HSDP)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_pipesync.lab.bench.benchmark import Benchmark
from lightning_pipesync.lab.bench.candidate import Candidate
from lightning_pipesync.lab.bench.candidates import Wrapped, sharded
from lightning_pipesync.lab.bench.hsdp import OverlappedHSDP
from lightning_pipesync.lab.bench.method_candidate import method_candidates
from lightning_pipesync.lab.bench.models import BenchModel, model_names

ALONE, HSDP = "no communication between hosts", "FSDP2 on both (HSDP)"

#: Makes a candidate of a model that is whole; a collective call.
MakeCandidate = Callable[[BenchModel], Candidate]


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
        for method in self.methods:  # raises if one is unknown
            method_candidates(method, self.bucket_mb)
        super().__post_init__()

    @property
    def num_candidates(self) -> int:
        methods = sum(len(method_candidates(method, self.bucket_mb)) for method in self.methods)
        return 2 + len(self.bucket_mb) + methods

    def makers(self, mesh: DeviceMesh) -> list[MakeCandidate]:
        """Returns factories of what is compared on the mesh; :data:`ALONE` and :data:`HSDP` are the first."""
        shards, replicas = mesh["shards"], mesh["replicas"]

        def in_shards(make: MakeCandidate, model: BenchModel) -> Candidate:
            return make(sharded(model, shards, self.reshard))

        methods: list[MakeCandidate] = [lambda model: Wrapped(ALONE, model, model.module, "compute")]
        methods += [partial(OverlappedHSDP, replicas=replicas, bucket_mb=size) for size in self.bucket_mb]
        for method in self.methods:
            methods += method_candidates(method, self.bucket_mb, replicas=replicas)
        made = [partial(in_shards, make) for make in methods]
        return [made[0], lambda model: hsdp(sharded(model, mesh, self.reshard)), *made[1:]]


def device_mesh(ranks_per_replica: int, device: str = "cpu") -> DeviceMesh:
    """Returns the mesh of all ranks, replicas of neighboring ones, with ``replicas`` and ``shards``; a collective call.

    Raises:
        ValueError: the ranks do not form two or more replicas.
    """
    replicas, rest = divmod(dist.get_world_size(), ranks_per_replica)
    if rest or replicas < 2:
        raise ValueError(
            f"ranks_per_replica={ranks_per_replica} does not divide {dist.get_world_size()} ranks into two or more "
            "replicas: start a rank for each device with torchrun."
        )
    return init_device_mesh(device, (replicas, ranks_per_replica), mesh_dim_names=("replicas", "shards"))


def hsdp(model: BenchModel) -> Wrapped:
    """A model that FSDP2 has sharded along both dimensions: what methods between replicas are compared with."""
    return Wrapped(HSDP, model, model.module, "baseline")
