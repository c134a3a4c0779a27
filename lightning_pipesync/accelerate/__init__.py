"""The methods for Hugging Face Accelerate, whose loop stays as it was."""

from lightning_pipesync.accelerate.accelerator import PipeSyncAccelerator
from lightning_pipesync.accelerate.plugin import PipeSyncPlugin

__all__ = ["PipeSyncAccelerator", "PipeSyncPlugin"]
