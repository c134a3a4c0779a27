"""Strategies of the Trainer of ``lightning.pytorch``; importing this module registers their names.

Written by docs/strategy_classes.py: change a method's settings instead, and run it.
"""

from __future__ import annotations

from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from lightning_pipesync.lightning import arguments
from lightning_pipesync.lightning.callback import PipeSyncCallbackMixin
from lightning_pipesync.lightning.step_report import StepReportMixin
from lightning_pipesync.lightning.users_strategy import users_strategy
from lightning_pipesync.training.strategies import Strategies


class PipeSyncCallback(PipeSyncCallbackMixin, Callback):
    __doc__ = PipeSyncCallbackMixin.__doc__


class StepReport(StepReportMixin, Callback):
    __doc__ = StepReportMixin.__doc__


class DeARStrategy(arguments.DeARStrategyMixin, DDPStrategy):
    __doc__ = arguments.DeARStrategyMixin.__doc__
    callback_class = PipeSyncCallback


class EAPipeStrategy(arguments.EAPipeStrategyMixin, DDPStrategy):
    __doc__ = arguments.EAPipeStrategyMixin.__doc__
    callback_class = PipeSyncCallback


class LocalSGDStrategy(arguments.LocalSGDStrategyMixin, DDPStrategy):
    __doc__ = arguments.LocalSGDStrategyMixin.__doc__
    callback_class = PipeSyncCallback


class ParameterServerStrategy(arguments.ParameterServerStrategyMixin, DDPStrategy):
    __doc__ = arguments.ParameterServerStrategyMixin.__doc__
    callback_class = PipeSyncCallback


class PipeSGDStrategy(arguments.PipeSGDStrategyMixin, DDPStrategy):
    __doc__ = arguments.PipeSGDStrategyMixin.__doc__
    callback_class = PipeSyncCallback


class SelSyncStrategy(arguments.SelSyncStrategyMixin, DDPStrategy):
    __doc__ = arguments.SelSyncStrategyMixin.__doc__
    callback_class = PipeSyncCallback


_make = users_strategy(DDPStrategy, PipeSyncCallback, __name__)
STRATEGIES = Strategies(StrategyRegistry, globals(), "Strategy", _make)
