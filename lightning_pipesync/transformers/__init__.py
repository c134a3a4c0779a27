"""Support for transformers' Trainer."""

from lightning_pipesync.transformers.trainer import PipeSyncTrainerMixin

__all__ = ["PipeSyncTrainerMixin"]
