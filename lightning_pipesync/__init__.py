"""Fast distributed training on networks slower than the accelerators.

Importing the package registers the strategies, so that ``Trainer(strategy="selsync")`` and
``Fabric(strategy="selsync")`` find them.
"""

from typing import TYPE_CHECKING, Any

import lightning_pipesync.fabric  # noqa: F401 - registers the strategies
from lightning_pipesync.core.codecs import TopK
from lightning_pipesync.data import LabelSkewedSampler, SelDPSampler, label_skewed_partition
from lightning_pipesync.lightning import DeARStrategy, EAPipeStrategy, PipeSGDStrategy, SelSyncStrategy
from lightning_pipesync.methods.dear import DeAR, DeARConfig
from lightning_pipesync.methods.ea_pipe import EAPipe, EAPipeConfig
from lightning_pipesync.methods.pipe_sgd import PipeSGD, PipeSGDConfig
from lightning_pipesync.methods.selsync import SelSync, SelSyncConfig

if TYPE_CHECKING:
    from lightning_pipesync.accelerate import PipeSyncAccelerator, PipeSyncPlugin

__version__ = "0.1.0"

__all__ = [
    "DeAR",
    "DeARConfig",
    "DeARStrategy",
    "EAPipe",
    "EAPipeConfig",
    "EAPipeStrategy",
    "LabelSkewedSampler",
    "PipeSGD",
    "PipeSGDConfig",
    "PipeSGDStrategy",
    "PipeSyncAccelerator",
    "PipeSyncPlugin",
    "SelDPSampler",
    "SelSync",
    "SelSyncConfig",
    "SelSyncStrategy",
    "TopK",
    "label_skewed_partition",
]


def __getattr__(name: str) -> Any:
    """Imports what needs Accelerate when it is asked for: users of Lightning need not wait for it."""
    if name in ("PipeSyncAccelerator", "PipeSyncPlugin"):
        from lightning_pipesync import accelerate

        return getattr(accelerate, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
