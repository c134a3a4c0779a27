"""What the papers measure against: other ways to overlap exact synchronous SGD, over this package's collectives.

Importing it adds them, and further networks, to what `bench step` compares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.baselines.byte_scheduler import ByteScheduler
from benchmarks.baselines.grouped import AllGatherOnly, GroupedAllReduce, MergedAllReduce, ReduceScatterOnly
from benchmarks.baselines.horovod import Horovod, TunedHorovod
from benchmarks.baselines.networks import densenet201, gpt2, inceptionv4
from benchmarks.baselines.power_sgd import DDPWithPowerSGD, PowerSGDConfig
from benchmarks.baselines.servers import ParameterServerBaseline
from lightning_pipesync.lab.bench.candidates import ALTERNATIVES, MakeCandidate
from lightning_pipesync.lab.bench.models import TABLES, BenchModel


def serial(model: BenchModel, bucket_mb: float) -> GroupedAllReduce:
    """All-reduces of buckets after backward, hidden under nothing."""
    return GroupedAllReduce(f"all-reduce after backward, {bucket_mb:g} MiB", model, "serial", bucket_mb, hidden=False)


def wfbp(model: BenchModel) -> GroupedAllReduce:
    """Wait-free backpropagation: the all-reduce of each tensor by itself, under backward."""
    return GroupedAllReduce("WFBP", model, "baseline", bucket_mb=None)


def power_sgd(model: BenchModel, bucket_mb: float) -> DDPWithPowerSGD:
    """DDP with torch's own PowerSGD."""
    return DDPWithPowerSGD(model, PowerSGDConfig(bucket_mb=bucket_mb))


#: By name, a function of the bucket sizes in MiB.
BASELINES: dict[str, Callable[[Sequence[float]], list[MakeCandidate]]] = {
    "serial": lambda sizes: [partial(serial, bucket_mb=size) for size in sizes],
    "wfbp": lambda _: [wfbp],
    "mg-wfbp": lambda _: [MergedAllReduce],
    "horovod": lambda _: [Horovod],
    "horovod-bo": lambda _: [TunedHorovod],
    "byte-scheduler": lambda sizes: [partial(ByteScheduler, partition_mb=size) for size in sizes],
    "ps": lambda _: [ParameterServerBaseline],
    "dear-rs": lambda sizes: [partial(ReduceScatterOnly, bucket_mb=size) for size in sizes],
    "dear-ag": lambda sizes: [partial(AllGatherOnly, bucket_mb=size) for size in sizes],
    "ddp_powersgd": lambda sizes: [partial(power_sgd, bucket_mb=sizes[0])],
}
ALTERNATIVES |= BASELINES
TABLES |= {"densenet201": densenet201, "inceptionv4": inceptionv4, "gpt2": gpt2}
