"""The strategies and the callback for the ``lightning`` distribution."""

from __future__ import annotations

from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy

from lightning_pipesync.lightning.callback import PipelineCallbackMixin, PipeSyncCallbackMixin
from lightning_pipesync.lightning.dear import DeARStrategyMixin
from lightning_pipesync.lightning.ea_pipe import EAPipeStrategyMixin
from lightning_pipesync.lightning.pipe_sgd import PipeSGDStrategyMixin
from lightning_pipesync.lightning.selsync import SelSyncStrategyMixin
from lightning_pipesync.lightning.strategy import PipeSyncStrategyMixin


class PipeSyncCallback(PipeSyncCallbackMixin, Callback):
    __doc__ = PipeSyncCallbackMixin.__doc__


class PipelineCallback(PipelineCallbackMixin, Callback):
    __doc__ = PipelineCallbackMixin.__doc__


class DeARStrategy(DeARStrategyMixin, DDPStrategy):
    __doc__ = DeARStrategyMixin.__doc__
    callback_class = PipeSyncCallback


class EAPipeStrategy(EAPipeStrategyMixin, DDPStrategy):
    __doc__ = EAPipeStrategyMixin.__doc__
    callback_class = PipelineCallback


class PipeSGDStrategy(PipeSGDStrategyMixin, DDPStrategy):
    __doc__ = PipeSGDStrategyMixin.__doc__
    callback_class = PipeSyncCallback


class SelSyncStrategy(SelSyncStrategyMixin, DDPStrategy):
    __doc__ = SelSyncStrategyMixin.__doc__
    callback_class = PipeSyncCallback


STRATEGIES: list[type[PipeSyncStrategyMixin]] = [DeARStrategy, EAPipeStrategy, PipeSGDStrategy, SelSyncStrategy]
