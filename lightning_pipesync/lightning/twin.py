"""Strategies of the Trainer of ``pytorch_lightning``; importing this module registers their names.

Written by docs/strategy_classes.py: change a method's settings instead, and run it.
"""

from __future__ import annotations

from pytorch_lightning import Callback
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry

from lightning_pipesync.lightning import arguments
from lightning_pipesync.lightning.callback import PipeSyncCallbackMixin
from lightning_pipesync.lightning.pipeline import mixin_of
from lightning_pipesync.lightning.step_report import StepReportMixin
from lightning_pipesync.lightning.trace import TraceCallbackMixin
from lightning_pipesync.training.strategies import Strategies


class PipeSyncCallback(PipeSyncCallbackMixin, Callback): ...  # type: ignore[misc]


class StepReport(StepReportMixin, Callback): ...  # type: ignore[misc]


class TraceCallback(TraceCallbackMixin, Callback): ...  # type: ignore[misc]


class _Strategy(DDPStrategy):
    callback_class: type[Callback] = PipeSyncCallback


class DeARStrategy(arguments.DeARStrategyMixin, _Strategy): ...  # type: ignore[misc]


class EAPipeStrategy(arguments.EAPipeStrategyMixin, _Strategy): ...  # type: ignore[misc]


class LocalSGDStrategy(arguments.LocalSGDStrategyMixin, _Strategy): ...  # type: ignore[misc]


class ParameterServerStrategy(arguments.ParameterServerStrategyMixin, _Strategy): ...  # type: ignore[misc]


class PipeSGDStrategy(arguments.PipeSGDStrategyMixin, _Strategy): ...  # type: ignore[misc]


class SelSyncStrategy(arguments.SelSyncStrategyMixin, _Strategy): ...  # type: ignore[misc]


STRATEGIES = Strategies(StrategyRegistry, globals(), "Strategy", _Strategy, mixin_of)
