"""``Fabric(strategy="selsync")``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipesync.fabric.strategy import PipeSyncFabricStrategyMixin
from lightning_pipesync.methods.selsync import SelSync


class SelSyncFabricStrategyMixin(PipeSyncFabricStrategyMixin):
    """SelSync for Fabric: local steps, synchronised only when some rank's gradient changes by more than ``delta``.

    Outside ``consolidated()`` each rank's weights are its own.

    Args:
        settings: see :class:`SelSyncConfig`; further ones as in DDPStrategy.

    Raises:
        ValueError: there is no such setting, or it is out of its range; the message names it and its value.
    """

    name = "selsync"
    not_in_fabric: ClassVar[Mapping[str, str]] = {
        "partition": "the order of the data is that of the loader: give it a SelDPSampler, or any other",
        "full_pass": "give the loader a SelDPSampler(full_pass=...)",
        "injection": "call a DataInjection on each batch, and give the loader its adjusted_batch_size",
    }

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.checkpoint_replicas = self.config.checkpoint_replicas
        self._taken: dict[Optimizer, Tensor | None] = {}  # by optimizer, a gradient that was measured

    def attach_method(self, module: nn.Module, optimizers: list[Optimizer]) -> SelSync:
        return SelSync(module, optimizers, self.config, backend=self._traffic_backend)

    def take_gradient(self, optimizer: Optimizer) -> None:
        """Measures the gradient, once in a step.

        Raises:
            RuntimeError: it is another one than that which was measured: a step was left out, and the other ranks may
                have taken it.
        """
        if not cast("SelSync", self.method_of(optimizer)).measured(optimizer):
            super().take_gradient(optimizer)
            self._taken[optimizer] = _first_gradient(optimizer)
        elif self._taken[optimizer] is not _first_gradient(optimizer):
            raise RuntimeError(
                f"A step of {type(optimizer).__name__} was left out after fabric.clip_gradients() had measured its "
                "gradient, by which all ranks decide whether to synchronise: take each step on all ranks; to change "
                "nothing by it, set the gradients to zero."
            )

    def optimizer_step(self, optimizer: Optimizer, **kwargs: Any) -> Any:  # type: ignore[override]
        result = super().optimizer_step(optimizer, **kwargs)
        self._taken.pop(optimizer, None)
        return result


def _first_gradient(optimizer: Optimizer) -> Tensor | None:
    gradients = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
    return next((gradient for gradient in gradients if gradient is not None), None)
