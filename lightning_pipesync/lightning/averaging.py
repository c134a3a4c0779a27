"""Strategies of methods that average every gradient over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_pipesync.fabric.private import unwrapped
from lightning_pipesync.lightning.strategy import PipeSyncStrategyMixin
from lightning_pipesync.methods.method import AveragingMethod

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class AveragingStrategyMixin(PipeSyncStrategyMixin):
    """Hands the gradient to the method before anybody else looks at it, and clips what the method will apply."""

    method: AveragingMethod | None = None

    def gradient_is_complete(self, optimizer: Optimizer) -> None:
        """Called when a backward pass has ended, before a loss scaler changes ``p.grad``."""
        assert self.method is not None
        self.method.before_unscaling(optimizer, None if self._scaler is None else self._scaler.get_scale())

    @override
    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if self.method is not None:
            # The gradient to clip is not in p.grad yet, where the plugin would look for it, or never is.
            self.precision_plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]
            self.precision_plugin.clip_grad_by_value = self._clip_by_value  # type: ignore[method-assign]

    @override
    def teardown(self) -> None:
        for name in ("clip_grad_by_norm", "clip_grad_by_value"):
            vars(self.precision_plugin).pop(name, None)
        super().teardown()

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        def compute_and_hand_over() -> Any:
            result = closure()
            self.gradient_is_complete(optimizer)
            return result

        return super().optimizer_step(optimizer, compute_and_hand_over, model, **kwargs)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Has the training loader of a resumed run go on where the run was interrupted, also within an epoch."""
        dataloader = super().process_dataloader(dataloader)
        if not self._training or not isinstance(dataloader, DataLoader):
            return dataloader
        return self.begin_where_stopped(dataloader)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Within it gradients are accumulated, and nothing is communicated."""
        with nullcontext() if self.method is None else self.method.no_sync():
            yield

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        assert self.method is not None
        self.gradient_is_complete(unwrapped(optimizer))  # with manual optimization it may not have been told
        self.method.clip(clip_val, unwrapped(optimizer))

    def _clip_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        assert self.method is not None
        self.gradient_is_complete(unwrapped(optimizer))
        self.method.clip_value(clip_val, unwrapped(optimizer))
