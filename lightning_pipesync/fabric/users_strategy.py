"""Fabric's strategy of a method that a user registers, and the refusal of pipelines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from lightning_pipesync.fabric.strategy import PipeSyncFabricStrategyMixin
from lightning_pipesync.methods.method import Method
from lightning_pipesync.training.strategies import strategy_class


def users_strategy(base: type, module: str) -> Callable[[type[Method]], Any]:
    """Returns what creates the strategy class of a user's method, or for a pipeline a function that raises.

    Args:
        base: the distribution's DDPStrategy.
        module: name of the module that exports the class.
    """

    def make(method: type[Method]) -> Any:
        name = f"{method.__name__}FabricStrategy"
        if not method.makes_passes:
            bases = (PipeSyncFabricStrategyMixin, base)
            return strategy_class(name, method, bases, method.config_type.for_trainer, __module__=module)

        def refuse(*_: Any, **__: Any) -> NoReturn:
            """Pipelines cannot be strategies of Fabric."""
            raise ValueError(
                f"strategy={method.name!r} cannot run under Fabric, whose loop makes the backward pass of one "
                "mini-batch at a time; a pipeline has several in flight. Use Fabric(strategy='ddp') and, after "
                f"launch(), lightning_pipesync.{method.__name__}(layers, loss, optimizer_factory) with "
                "train_batch(batch) in the loop instead of fabric.setup(); or "
                f"Trainer(strategy={method.name!r})."
            )

        refuse.__name__ = name
        return refuse

    return make
