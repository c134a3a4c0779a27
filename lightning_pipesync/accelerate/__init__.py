"""The methods for Hugging Face Accelerate."""

from lightning_pipesync.core.extras import check_extra

check_extra("accelerate", __name__)

from lightning_pipesync.accelerate.accelerator import PipeSyncAccelerator
from lightning_pipesync.accelerate.plugin import PipeSyncPlugin

__all__ = ["PipeSyncAccelerator", "PipeSyncPlugin"]
