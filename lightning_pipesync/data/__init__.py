"""Data order and data exchange: SelDP, label-skewed partition, data injection."""

from lightning_pipesync.data.injection import DataInjection, PointToPoint, adjusted_batch_size
from lightning_pipesync.data.samplers import (
    LabelSkewedSampler,
    ResumableSampler,
    SelDPSampler,
    label_skewed_partition,
)
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
