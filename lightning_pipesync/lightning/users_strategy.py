"""The Trainer's strategy of a method that a user registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_pipesync.lightning.pipeline import PipelineStrategyMixin
from lightning_pipesync.lightning.sync import SyncStrategyMixin
from lightning_pipesync.methods.method import Method
from lightning_pipesync.training.strategies import strategy_class


def users_strategy(base: type, callback: type, module: str) -> Callable[[type[Method]], type[Any]]:
    """Returns what creates the strategy class of a user's method.

    Args:
        base: the distribution's DDPStrategy.
        callback: the distribution's callback of the strategies.
        module: name of the module that exports the class.
    """

    def make(method: type[Method]) -> type[Any]:
        mixin = PipelineStrategyMixin if method.makes_passes else SyncStrategyMixin
        without = method.config_type.set_by_trainer
        name = f"{method.__name__}Strategy"
        return strategy_class(name, method, (mixin, base), without, callback_class=callback, __module__=module)

    return make
