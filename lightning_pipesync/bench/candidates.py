"""The candidates of the benchmark of a training step: the methods of this package, and their alternatives."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from lightning_pipesync.bench.baselines import (
    AllGatherOnly,
    ByteScheduler,
    GroupedAllReduce,
    Horovod,
    MergedAllReduce,
    ParameterServer,
    ReduceScatterOnly,
    TunedHorovod,
)
from lightning_pipesync.bench.candidate import LEARNING_RATE, MOMENTUM, Candidate, sgd
from lightning_pipesync.bench.models import BenchModel
from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.methods.dear import DeAR
from lightning_pipesync.methods.pipe_sgd import PipeSGD
from lightning_pipesync.methods.selsync import SelSync
from lightning_pipesync.methods.sync_method import SyncMethod


class Wrapped(Candidate):
    """A wrapped module that communicates in backward, and an optimizer: DDP, FSDP2, ZeRO, or no communication."""

    def __init__(self, name: str, model: BenchModel, module: nn.Module, optimizer: Optimizer, limit: str) -> None:
        super().__init__(name, model)
        self.module, self.optimizer, self.limit = module, optimizer, limit

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model.loss(self.module, self.batch).backward()
        self.optimizer.step()


class WithMethod(Candidate):
    """A method of this package."""

    def __init__(self, name: str, model: BenchModel, limit: str, method: type[SyncMethod], **settings: Any) -> None:
        super().__init__(name, model)
        self.limit = limit
        self.optimizer = sgd(model.module.parameters())
        self.sync = method(model.module, self.optimizer, **settings)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model.loss(self.model.module, self.batch).backward()
        self.sync.step()

    def prepare(self) -> dict[str, Any] | None:
        if not isinstance(self.sync, DeAR):
            return None
        started = time.perf_counter()
        steps = 0
        while not (self.sync.tuned and self.sync.planned):
            self.step()
            steps += 1
        if not self.sync.trials:
            return None
        took, fusion = time.perf_counter() - started, self.sync.fusion
        tried = len({trial.seconds for trial in self.sync.trials})  # equal buckets are measured once
        return {"trials": tried, "steps": steps, "seconds": took, "size": fusion.bucket_mb, "edge": fusion.edge_mb}

    def drain(self) -> None:
        self.sync.flush()
        self.sync.resume()

    def close(self) -> None:
        self.sync.detach()


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


def dear(model: BenchModel, name: str, limit: str = "eager", **settings: Any) -> WithMethod:
    """DeAR, with gathers under backward unless ``overlap="paper"``."""
    return WithMethod(name, model, limit, DeAR, **settings)


def selsync(model: BenchModel, name: str, limit: str, **settings: Any) -> WithMethod:
    """SelSync with steps of one kind only."""
    return WithMethod(f"SelSync, {name}", model, limit, SelSync, **settings)


class WithPipeSGD(WithMethod):
    """Pipe-SGD, one step stale."""

    def __init__(
        self, model: BenchModel, compression: str = "none", level: int = 1, segments: int = 4, predicts: bool = True
    ) -> None:
        details = [compression] * (compression != "none") + [f"level {level}"] * (level != 1)
        details += ["no prediction"] * (not predicts)
        settings = {"compression": compression, "pipeline_level": level, "segments": segments}
        settings["delay_compensation"] = "prediction" if predicts else "none"
        super().__init__(", ".join(["Pipe-SGD", *details]), model, "pipe_sgd", PipeSGD, **settings)
        self.sync: PipeSGD
        numel = sum(parameter.numel() for parameter in model.module.parameters())
        self.compression = 4 * numel / get_codec(compression).wire_bytes(numel, torch.float32)
        self.segments = segments if level == 2 else 1

    def begin(self) -> None:
        self.step()  # its gradient may have started within the backward pass
        self.step()

    def drain(self) -> None:
        self.sync.drain()


#: By name: a function of the bucket sizes in MiB that returns factories of candidates.
METHODS: dict[str, Callable[[Sequence[float]], list[Callable[[BenchModel], Candidate]]]] = {
    "ddp": lambda sizes: [partial(ddp, bucket_mb=size) for size in sizes],
    "fsdp2": lambda _: [fsdp2],
    "serial": lambda sizes: [partial(serial, bucket_mb=size) for size in sizes],
    "wfbp": lambda _: [wfbp],
    "mg-wfbp": lambda _: [MergedAllReduce],
    "horovod": lambda _: [Horovod],
    "horovod-bo": lambda _: [TunedHorovod],
    "byte-scheduler": lambda sizes: [partial(ByteScheduler, partition_mb=size) for size in sizes],
    "ps": lambda _: [ParameterServer],
    "zero": lambda sizes: [partial(zero, bucket_mb=sizes[0])],
    "dear": lambda sizes: [
        partial(dear, name=f"DeAR, {size:g} MiB", fusion="buffer", bucket_mb=size) for size in sizes
    ],
    "dear-paper": lambda sizes: [
        partial(
            dear, name=f"DeAR (paper), {size:g} MiB", limit="dear", fusion="buffer", bucket_mb=size, overlap="paper"
        )
        for size in sizes
    ],
    "dear-none": lambda _: [partial(dear, name="DeAR, no fusion", fusion="none")],
    "dear-layers": lambda _: [partial(dear, name="DeAR, 4 layers", fusion="layers")],
    "dear-rs": lambda sizes: [partial(ReduceScatterOnly, bucket_mb=size) for size in sizes],
    "dear-ag": lambda sizes: [partial(AllGatherOnly, bucket_mb=size) for size in sizes],
    "dear-bo": lambda _: [partial(dear, name="DeAR, bo", fusion="bo")],
    "dear-random": lambda _: [partial(dear, name="DeAR, random", fusion="random")],
    "dear-grid": lambda _: [partial(dear, name="DeAR, grid", fusion="grid")],
    "pipe_sgd": lambda _: [WithPipeSGD],
    "pipe_sgd-paper": lambda _: [partial(WithPipeSGD, predicts=False)],
    "pipe_sgd-level2": lambda _: [partial(WithPipeSGD, level=2)],
    "pipe_sgd-truncate16": lambda _: [partial(WithPipeSGD, compression="truncate16")],
    "pipe_sgd-int8": lambda _: [partial(WithPipeSGD, compression="int8")],
    "selsync": lambda sizes: [
        *(
            partial(
                selsync,
                name=f"synchronized step, {size:g} MiB",
                limit="under_forward",
                delta=0.0,
                bucket_mb=size,
                overlap="forward",
            )
            for size in sizes
        ),
        partial(selsync, name="local step", limit="compute", delta=1e9),
    ],
    "selsync-serial": lambda _: [partial(selsync, name="synchronized step, serial", limit="serial", delta=0.0)],
}


def makers(methods: Sequence[str], bucket_mb: Sequence[float]) -> list[Callable[[BenchModel], Candidate]]:
    """Returns factories of the candidates of some ``METHODS``, each for a model; calling one is collective."""
    return [make for method in methods for make in METHODS[method](bucket_mb)]


def in_ddp(module: nn.Module, bucket_mb: float) -> DistributedDataParallel:
    """Returns the module in DDP, with the settings that its documentation recommends for speed."""
    return DistributedDataParallel(module, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True, static_graph=True)
