"""Fast distributed training on networks slower than the accelerators.

Importing the package registers the strategies, so that ``Trainer(strategy="selsync")`` and
``Fabric(strategy="selsync")`` find them.
"""

from typing import TYPE_CHECKING, Any

from lightning_pipesync import fabric, lightning
from lightning_pipesync.core.codecs import TopK
from lightning_pipesync.data import LabelSkewedSampler, SelDPSampler, label_skewed_partition
from lightning_pipesync.methods.dear import DeAR, DeARConfig
from lightning_pipesync.methods.ea_pipe import EAPipe, EAPipeConfig
from lightning_pipesync.methods.method import Method
from lightning_pipesync.methods.pipe_sgd import PipeSGD, PipeSGDConfig
from lightning_pipesync.methods.selsync import SelSync, SelSyncConfig
from lightning_pipesync.training.registry import METHODS

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
    "register_method",
]


def register_method(method: type[Method]) -> None:
    """Makes a method of one's own known to all frameworks under its ``name``, as those of the package are.

    Raises:
        ValueError: the name is taken.
    """
    if METHODS.get(method.name, method) is not method:
        raise ValueError(f"name={method.name!r} is that of {METHODS[method.name].__name__}: choose another one.")
    METHODS[method.name] = method
    lightning.register(method)
    fabric.register(method)


def __getattr__(name: str) -> Any:
    """Returns the Trainer's strategies, and imports Accelerate, which takes long, when it is asked for."""
    if name in ("PipeSyncAccelerator", "PipeSyncPlugin"):
        from lightning_pipesync import accelerate

        return getattr(accelerate, name)
    if name.endswith("Strategy"):
        return getattr(lightning, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
