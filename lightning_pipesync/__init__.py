"""Fast distributed training on networks slower than the accelerators.

Importing the package registers the strategies, so that ``Trainer(strategy="selsync")`` and
``Fabric(strategy="selsync")`` find them. It imports no framework: a framework's strategies are registered when the user
imports the framework, before or after.
"""

import sys
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from wrapt import register_post_import_hook

from lightning_pipesync.core.codecs import TopK
from lightning_pipesync.core.extras import check_extra, is_installed, missing_extra
from lightning_pipesync.data import LabelSkewedSampler, SelDPSampler, label_skewed_partition
from lightning_pipesync.methods.dear import DeAR, DeARConfig
from lightning_pipesync.methods.ea_pipe import EAPipe, EAPipeConfig
from lightning_pipesync.methods.local_sgd import LocalSGD, LocalSGDConfig
from lightning_pipesync.methods.method import Method
from lightning_pipesync.methods.pipe_sgd import PipeSGD, PipeSGDConfig
from lightning_pipesync.methods.selsync import SelSync, SelSyncConfig
from lightning_pipesync.methods.servers import ParameterServer, ParameterServerConfig
from lightning_pipesync.training.linear_scaling import LinearScalingLR
from lightning_pipesync.training.rank_times import step_report
from lightning_pipesync.training.registry import ADVISORS, METHODS, check_method

if TYPE_CHECKING:
    from lightning_pipesync import fabric as fabric
    from lightning_pipesync import lightning as lightning
    from lightning_pipesync.accelerate import PipeSyncAccelerator, PipeSyncPlugin
    from lightning_pipesync.lab.plan.callback import PlanCallback
    from lightning_pipesync.lightning import (
        DeARStrategy,
        EAPipeStrategy,
        LocalSGDStrategy,
        ParameterServerStrategy,
        PipeSGDStrategy,
        SelSyncStrategy,
        StepReport,
        TraceCallback,
    )
    from lightning_pipesync.transformers import PipeSyncTrainer

__version__ = "0.2.0"

__all__ = [
    "DeAR",
    "DeARConfig",
    "DeARStrategy",
    "EAPipe",
    "EAPipeConfig",
    "EAPipeStrategy",
    "LabelSkewedSampler",
    "LinearScalingLR",
    "LocalSGD",
    "LocalSGDConfig",
    "LocalSGDStrategy",
    "ParameterServer",
    "ParameterServerConfig",
    "ParameterServerStrategy",
    "PipeSGD",
    "PipeSGDConfig",
    "PipeSGDStrategy",
    "PipeSyncAccelerator",
    "PipeSyncPlugin",
    "PipeSyncTrainer",
    "PlanCallback",
    "SelDPSampler",
    "SelSync",
    "SelSyncConfig",
    "SelSyncStrategy",
    "StepReport",
    "TopK",
    "TraceCallback",
    "label_skewed_partition",
    "register_method",
    "step_report",
]


def register_method(method: type[Method]) -> None:
    """Makes a method of one's own known to all frameworks under its ``name``, as those of the package are.

    Raises:
        ValueError: the class has no name, or another method's; it lacks a method that it has to implement; or its
            settings are no frozen dataclass with defaults.
    """
    check_method(method)
    METHODS[method.name] = method
    for adapter in _STRATEGIES_FOR.values():
        if adapter in sys.modules:
            sys.modules[adapter].STRATEGIES.register(method)


def _place_of(name: str) -> tuple[str, str] | None:
    """Returns the extra that a name needs, and the module that has it; None: it needs no extra, or is unknown."""
    if name in ("PipeSyncAccelerator", "PipeSyncPlugin"):
        return "accelerate", "accelerate"
    if name == "PipeSyncTrainer":
        return "transformers", "transformers"
    if name == "PlanCallback":
        return "lightning", "lab.plan.callback"
    if name in ("StepReport", "TraceCallback") or name.endswith("Strategy"):
        return "lightning", "lightning"
    return None


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Returns what needs a framework, and imports that when it is asked for."""
        if name in ("fabric", "lightning"):
            return import_module(f"{__name__}.{name}")
        if (place := _place_of(name)) is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        extra, module = place
        check_extra(extra, name)
        return getattr(import_module(f"{__name__}.{module}"), name)

    # ``from lightning_pipesync import *`` imports what can be used with the packages that are installed.
    __all__ = [name for name in __all__ if (place := _place_of(name)) is None or missing_extra(place[0], name) is None]


def _advisor_of(trainer: Any, method: Any) -> Any:
    from lightning_pipesync.lab.plan.advice import Advisor

    return Advisor.of(trainer, method)


ADVISORS.append(_advisor_of)

#: By name of a framework's package, the module that registers the strategies for it.
_STRATEGIES_FOR = {
    "lightning.pytorch": f"{__name__}.lightning",
    "pytorch_lightning": f"{__name__}.lightning.twin",
    "lightning.fabric": f"{__name__}.fabric",
    "lightning_fabric": f"{__name__}.fabric.twin",
}
if not is_installed("lightning"):  # its twins take its place
    _STRATEGIES_FOR = {"pytorch_lightning": f"{__name__}.lightning", "lightning_fabric": f"{__name__}.fabric"}


def _register_strategies(framework: Any) -> None:
    try:
        import_module(_STRATEGIES_FOR[framework.__name__])
    except Exception as error:  # the user's import of the framework must not fail
        reason = f"{type(error).__name__}: {error}"
        warnings.warn(
            f"The strategies of {__name__} are not registered with {framework.__name__}. {reason}", stacklevel=2
        )


for _framework in _STRATEGIES_FOR:
    register_post_import_hook(_register_strategies, _framework)
