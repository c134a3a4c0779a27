"""Local SGD: steps on each rank's weights, averaged periodically, from FedAvg to DiLoCo."""

from lightning_pipesync.methods.local_sgd.config import LocalSGDConfig
from lightning_pipesync.methods.local_sgd.runtime import LocalSGD

__all__ = ["LocalSGD", "LocalSGDConfig"]
