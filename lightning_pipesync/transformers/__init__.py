"""Support for transformers' Trainer."""

from lightning_pipesync.core.extras import check_extra

check_extra("transformers", __name__)

from lightning_pipesync.transformers.trainer import PipeSyncTrainer, PipeSyncTrainerMixin

__all__ = ["PipeSyncTrainer", "PipeSyncTrainerMixin"]
