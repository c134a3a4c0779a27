"""The same for the twin distribution ``pytorch_lightning``, whose classes are others."""

from __future__ import annotations

from pytorch_lightning import Callback
from pytorch_lightning.strategies import DDPStrategy

from lightning_pipesync.lightning.callback import PipelineCallbackMixin, PipeSyncCallbackMixin
from lightning_pipesync.lightning.dear import DeARStrategyMixin
from lightning_pipesync.lightning.ea_pipe import EAPipeStrategyMixin
from lightning_pipesync.lightning.pipe_sgd import PipeSGDStrategyMixin
from lightning_pipesync.lightning.selsync import SelSyncStrategyMixin
from lightning_pipesync.lightning.strategy import PipeSyncStrategyMixin


class PipeSyncCallback(PipeSyncCallbackMixin, Callback):  # type: ignore[misc]
    __doc__ = PipeSyncCallbackMixin.__doc__


class PipelineCallback(PipelineCallbackMixin, Callback):  # type: ignore[misc]
    __doc__ = PipelineCallbackMixin.__doc__


class DeARStrategy(DeARStrategyMixin, DDPStrategy):  # type: ignore[misc]
    __doc__ = DeARStrategyMixin.__doc__
    callback_class = PipeSyncCallback


class EAPipeStrategy(EAPipeStrategyMixin, DDPStrategy):  # type: ignore[misc]
    __doc__ = EAPipeStrategyMixin.__doc__
    callback_class = PipelineCallback


class PipeSGDStrategy(PipeSGDStrategyMixin, DDPStrategy):  # type: ignore[misc]
    __doc__ = PipeSGDStrategyMixin.__doc__
    callback_class = PipeSyncCallback


class SelSyncStrategy(SelSyncStrategyMixin, DDPStrategy):  # type: ignore[misc]
    __doc__ = SelSyncStrategyMixin.__doc__
    callback_class = PipeSyncCallback


STRATEGIES: list[type[PipeSyncStrategyMixin]] = [DeARStrategy, EAPipeStrategy, PipeSGDStrategy, SelSyncStrategy]
