"""The candidates of the benchmark of a training step: the methods of this package, and their alternatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from lightning_pipesync.lab.bench.candidate import LEARNING_RATE, MOMENTUM, Candidate, sgd
from lightning_pipesync.lab.bench.models import BenchModel
from lightning_pipesync.lab.bench.with_method import MakeCandidate, with_method
from lightning_pipesync.lab.papers.baselines import (
    AllGatherOnly,
    ByteScheduler,
    GroupedAllReduce,
    Horovod,
    MergedAllReduce,
    ParameterServerBaseline,
    ReduceScatterOnly,
    TunedHorovod,
)


class Wrapped(Candidate):
    """A wrapped module that communicates in backward, and an optimizer: DDP, FSDP2, ZeRO, or no communication."""

    def __init__(self, name: str, model: BenchModel, module: nn.Module, optimizer: Optimizer, limit: str) -> None:
        super().__init__(name, model)
        self.module, self.optimizer, self.limit = module, optimizer, limit

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model.loss(self.module, self.batch).backward()
        self.optimizer.step()


def ddp_name(bucket_mb: float) -> str:
    return f"DDP, {bucket_mb:g} MiB"


def without_communication(model: BenchModel) -> Wrapped:
    """Each rank trains by itself: the time of computation alone."""
    return Wrapped("no communication", model, model.module, sgd(model.module.parameters()), "compute")


def ddp(model: BenchModel, bucket_mb: float) -> Wrapped:
    """``DistributedDataParallel``, which hides the all-reduce under backward."""
    module = in_ddp(model.module, bucket_mb)
    return Wrapped(ddp_name(bucket_mb), model, module, sgd(module.parameters()), "baseline")


def fsdp2(model: BenchModel) -> Wrapped:
    """FSDP2 without resharding after forward: reduce-scatter and all-gather, as in DeAR."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(model.module, mesh=mesh, reshard_after_forward=False)
    return Wrapped("FSDP2", model, model.module, sgd(model.module.parameters()), "dear")


def zero(model: BenchModel, bucket_mb: float) -> Wrapped:
    """DDP with ``ZeroRedundancyOptimizer``: each rank updates its part, and broadcasts it."""
    module = in_ddp(model.module, bucket_mb)
    optimizer = ZeroRedundancyOptimizer(module.parameters(), SGD, lr=LEARNING_RATE, momentum=MOMENTUM)
    return Wrapped("DDP + ZeRO-1", model, module, optimizer, "baseline")


def serial(model: BenchModel, bucket_mb: float) -> GroupedAllReduce:
    """All-reduces of buckets after backward, hidden under nothing."""
    return GroupedAllReduce(f"all-reduce after backward, {bucket_mb:g} MiB", model, "serial", bucket_mb, hidden=False)


def wfbp(model: BenchModel) -> GroupedAllReduce:
    """Wait-free backpropagation: the all-reduce of each tensor by itself, under backward."""
    return GroupedAllReduce("WFBP", model, "baseline", bucket_mb=None)


#: By name what this package's methods are compared with: a function of the bucket sizes in MiB.
ALTERNATIVES: dict[str, Callable[[Sequence[float]], list[MakeCandidate]]] = {
    "ddp": lambda sizes: [partial(ddp, bucket_mb=size) for size in sizes],
    "fsdp2": lambda _: [fsdp2],
    "serial": lambda sizes: [partial(serial, bucket_mb=size) for size in sizes],
    "wfbp": lambda _: [wfbp],
    "mg-wfbp": lambda _: [MergedAllReduce],
    "horovod": lambda _: [Horovod],
    "horovod-bo": lambda _: [TunedHorovod],
    "byte-scheduler": lambda sizes: [partial(ByteScheduler, partition_mb=size) for size in sizes],
    "ps": lambda _: [ParameterServerBaseline],
    "zero": lambda sizes: [partial(zero, bucket_mb=sizes[0])],
    "dear-rs": lambda sizes: [partial(ReduceScatterOnly, bucket_mb=size) for size in sizes],
    "dear-ag": lambda sizes: [partial(AllGatherOnly, bucket_mb=size) for size in sizes],
}


def makers(methods: Sequence[str], bucket_mb: Sequence[float]) -> list[MakeCandidate]:
    """Returns factories of candidates, each for a model; calling one is collective.

    Args:
        methods: some of :data:`ALTERNATIVES`, and methods of this package, see :func:`with_method`.
        bucket_mb: bucket sizes in MiB, of which there is a candidate each.

    Raises:
        ValueError: a method is unknown, or one of its settings.
    """
    if not methods:
        raise ValueError("methods must name something to compare.")
    makers: list[MakeCandidate] = []
    for method in methods:
        own = method.partition(":")[0] not in ALTERNATIVES
        makers += with_method(method, bucket_mb, known=ALTERNATIVES) if own else ALTERNATIVES[method](bucket_mb)
    return makers


def in_ddp(module: nn.Module, bucket_mb: float) -> DistributedDataParallel:
    """Returns the module in DDP, with the settings that its documentation recommends for speed."""
    return DistributedDataParallel(module, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True, static_graph=True)
