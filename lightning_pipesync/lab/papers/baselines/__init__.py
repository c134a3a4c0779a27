"""What the papers measure against: other ways to overlap exact synchronous SGD, over this package's collectives."""

from lightning_pipesync.lab.papers.baselines.byte_scheduler import ByteScheduler
from lightning_pipesync.lab.papers.baselines.central_server import ParameterServerBaseline, PushPull
from lightning_pipesync.lab.papers.baselines.grouped import (
    AllGatherOnly,
    GroupedAllReduce,
    MergedAllReduce,
    ReduceScatterOnly,
)
from lightning_pipesync.lab.papers.baselines.horovod import Horovod, TunedHorovod
from lightning_pipesync.lab.papers.baselines.over_transport import OverTransport

__all__ = [
    "AllGatherOnly",
    "ByteScheduler",
    "GroupedAllReduce",
    "Horovod",
    "MergedAllReduce",
    "OverTransport",
    "ParameterServerBaseline",
    "PushPull",
    "ReduceScatterOnly",
    "TunedHorovod",
]
