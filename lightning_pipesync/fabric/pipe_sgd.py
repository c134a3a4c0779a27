"""``Fabric(strategy="pipe_sgd")``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import nn
from torch.optim import Optimizer

from lightning_pipesync.fabric.strategy import PipeSyncFabricStrategyMixin
from lightning_pipesync.methods.pipe_sgd import PipeSGD


class PipeSGDFabricStrategyMixin(PipeSyncFabricStrategyMixin):
    """Pipe-SGD for Fabric: the all-reduce of one step runs under the next, whose gradients are exactly k steps stale.

    After ``clip_gradients`` and after the step, ``p.grad`` is the averaged gradient that is about to be applied; it is
    zero in the first ``staleness`` steps, which make no update.

    Args:
        settings: see :class:`PipeSGDConfig`; further ones as in DDPStrategy.

    Raises:
        ValueError: there is no such setting, or it is out of its range; the message names it and its value.
    """

    name = "pipe_sgd"
    not_in_fabric: ClassVar[Mapping[str, str]] = {
        "drain": "call fabric.strategy.method_of(optimizer).drain() after the last step"
    }

    def attach_method(self, module: nn.Module, optimizers: list[Optimizer]) -> PipeSGD:
        return PipeSGD(module, optimizers, self.config, backend=self._traffic_backend)
