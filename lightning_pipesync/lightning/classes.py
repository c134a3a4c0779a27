"""Creates the Trainer's strategy class of a method, for each distribution of Lightning."""

from __future__ import annotations

from typing import Any

from lightning_pipesync.lightning.callback import PipelineCallbackMixin, PipeSyncCallbackMixin
from lightning_pipesync.lightning.pipeline import PipelineStrategyMixin
from lightning_pipesync.lightning.sync import SyncStrategyMixin
from lightning_pipesync.methods.method import Method
from lightning_pipesync.training.strategies import strategy_class


def trainer_strategy(base: type, callback: type, method: type[Method], module: str) -> type[Any]:
    """Returns the strategy class of a method.

    Args:
        base: the distribution's DDPStrategy.
        callback: the distribution's Callback.
        method: the method's class.
        module: name of the module that exports the class.
    """
    mixin: type = PipelineStrategyMixin if method.makes_passes else SyncStrategyMixin
    callback_mixin: type = PipelineCallbackMixin if method.makes_passes else PipeSyncCallbackMixin
    callback_class = type(callback_mixin.__name__.removesuffix("Mixin"), (callback_mixin, callback), {})
    excluded = method.config_type.set_by_trainer
    return strategy_class("Strategy", method, (mixin, base), module, excluded, callback_class=callback_class)
