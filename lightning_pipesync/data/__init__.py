"""Data order and data exchange: SelDP, label-skewed partition, data injection."""

from lightning_pipesync.data.injection import DataInjection, PointToPoint, adjusted_batch_size
from lightning_pipesync.data.partition import LabelSkewedSampler, label_skewed_partition
from lightning_pipesync.data.resumable import ResumableSampler
from lightning_pipesync.data.seldp import SelDPSampler
from lightning_pipesync.data.train_loader import TrainLoader

__all__ = [
    "DataInjection",
    "LabelSkewedSampler",
    "PointToPoint",
    "ResumableSampler",
    "SelDPSampler",
    "TrainLoader",
    "adjusted_batch_size",
    "label_skewed_partition",
]
