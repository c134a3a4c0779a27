"""What the papers measure against: other ways to overlap exact synchronous SGD, over this package's collectives."""

from lightning_pipesync.lab.papers.baselines.byte_scheduler import ByteScheduler
from lightning_pipesync.lab.papers.baselines.central_server import CentralServer, ParameterServerBaseline
from lightning_pipesync.lab.papers.baselines.grouped import GroupedAllReduce, MergedAllReduce, ReduceScatterOnly
from lightning_pipesync.lab.papers.baselines.halves import AllGatherOnly
from lightning_pipesync.lab.papers.baselines.horovod import Horovod, TunedHorovod
from lightning_pipesync.lab.papers.baselines.over_transport import OverTransport
from lightning_pipesync.lab.papers.baselines.push_pull import PushPull

__all__ = [
    "AllGatherOnly",
    "ByteScheduler",
    "CentralServer",
    "GroupedAllReduce",
    "Horovod",
    "MergedAllReduce",
    "OverTransport",
    "ParameterServerBaseline",
    "PushPull",
    "ReduceScatterOnly",
    "TunedHorovod",
]
