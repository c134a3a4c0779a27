"""The strategies and the callback for the ``lightning`` distribution."""

from __future__ import annotations

from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy

from lightning_pipesync.lightning.callback import PipeSyncCallbackMixin
from lightning_pipesync.lightning.selsync import SelSyncStrategyMixin


class PipeSyncCallback(PipeSyncCallbackMixin, Callback):
    __doc__ = PipeSyncCallbackMixin.__doc__


class SelSyncStrategy(SelSyncStrategyMixin, DDPStrategy):
    __doc__ = SelSyncStrategyMixin.__doc__
    callback_class = PipeSyncCallback


STRATEGIES = [SelSyncStrategy]
