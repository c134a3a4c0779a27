"""Strategies of the Trainer of the twin distribution ``pytorch_lightning``; importing it registers their names."""

from functools import partial
from typing import Any

from pytorch_lightning import Callback
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry

from lightning_pipesync.lightning.classes import trainer_strategy
from lightning_pipesync.lightning.step_report import StepReportMixin
from lightning_pipesync.training.strategies import Strategies

STRATEGIES = Strategies(__name__, StrategyRegistry, partial(trainer_strategy, DDPStrategy, Callback))


StepReport: Any = type("StepReport", (StepReportMixin, Callback), {"__doc__": StepReportMixin.__doc__})


def __getattr__(name: str) -> Any:
    """Returns the strategy class of that name, ``<Method>Strategy``."""
    return STRATEGIES.find(name)
