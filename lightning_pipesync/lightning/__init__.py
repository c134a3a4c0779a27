"""Strategies of the Trainer of ``lightning.pytorch``; importing this module registers their names.

Written by docs/strategy_classes.py: change a method's settings instead, and run it.
"""

from __future__ import annotations

from lightning_pipesync.lightning import arguments
from lightning_pipesync.lightning.callback import PipeSyncCallbackMixin
from lightning_pipesync.lightning.distribution import Callback, DDPStrategy, StrategyRegistry
from lightning_pipesync.lightning.pipeline import mixin_of
from lightning_pipesync.lightning.step_report import StepReportMixin
from lightning_pipesync.lightning.trace import TraceCallbackMixin
from lightning_pipesync.training.strategies import Strategies


class PipeSyncCallback(PipeSyncCallbackMixin, Callback): ...


class StepReport(StepReportMixin, Callback): ...


class TraceCallback(TraceCallbackMixin, Callback): ...


class _Strategy(DDPStrategy):
    callback_class: type[Callback] = PipeSyncCallback


class DeARStrategy(arguments.DeARStrategyMixin, _Strategy): ...


class EAPipeStrategy(arguments.EAPipeStrategyMixin, _Strategy): ...


class LocalSGDStrategy(arguments.LocalSGDStrategyMixin, _Strategy): ...


class ParameterServerStrategy(arguments.ParameterServerStrategyMixin, _Strategy): ...


class PipeSGDStrategy(arguments.PipeSGDStrategyMixin, _Strategy): ...


class SelSyncStrategy(arguments.SelSyncStrategyMixin, _Strategy): ...


STRATEGIES = Strategies(StrategyRegistry, globals(), "Strategy", _Strategy, mixin_of)
