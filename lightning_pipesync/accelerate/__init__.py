"""The methods for Hugging Face Accelerate."""

from lightning_pipesync.core.extras import check_extra

check_extra("accelerate", __name__)

from lightning_pipesync.accelerate.accelerator import PipeSyncAccelerator  # noqa: E402
from lightning_pipesync.accelerate.plugin import PipeSyncPlugin  # noqa: E402

__all__ = ["PipeSyncAccelerator", "PipeSyncPlugin"]
