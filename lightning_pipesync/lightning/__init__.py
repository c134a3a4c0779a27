"""Strategies of the Trainer of ``lightning.pytorch``; importing this module registers their names."""

from __future__ import annotations

from lightning_pipesync.lightning.callback import PipeSyncCallbackMixin
from lightning_pipesync.lightning.distribution import Callback, DDPStrategy, StrategyRegistry
from lightning_pipesync.lightning.pipeline import mixin_of
from lightning_pipesync.lightning.step_report import StepReportMixin, TraceCallbackMixin
from lightning_pipesync.training.strategies import Strategies


class PipeSyncCallback(PipeSyncCallbackMixin, Callback): ...


class StepReport(StepReportMixin, Callback): ...


class TraceCallback(TraceCallbackMixin, Callback): ...


class _Strategy(DDPStrategy):
    callback_class: type[Callback] = PipeSyncCallback


#: Adds the class of each method, such as ``DeARStrategy``, to this module.
STRATEGIES = Strategies(StrategyRegistry, globals(), "Strategy", _Strategy, mixin_of)
