"""Callback hooks that the strategies need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipesync.core.private_names import ChecksOverrides
from lightning_pipesync.lightning.private import logs_this_batch, num_batches_trained
from lightning_pipesync.lightning.strategy import PipeSyncStrategyMixin

if TYPE_CHECKING:
    from lightning.pytorch import Callback as _Base
    from lightning.pytorch import LightningModule, Trainer
else:
    _Base = object


class PipeSyncCallbackMixin(ChecksOverrides, _Base):
    """Consolidates the weights before any other callback reads them, and logs the method's metrics.

    The strategies insert it as the first of the Trainer's callbacks.
    """

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _strategy(trainer).check_num_batches()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        _strategy(trainer).note_epoch_end(None)
        _strategy(trainer).resume()

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        _strategy(trainer).after_backward(optimizer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        strategy = _strategy(trainer)
        if trainer.is_last_batch or logs_this_batch(trainer):  # logging costs more than the rest of a local step
            metrics = {f"{strategy.name}/{name}": value for name, value in strategy.attached.metrics().items()}
            shown = {f"{strategy.name}/{name}" for name in strategy.attached.shown_metrics}
            # Without a batch_size, Lightning refuses to log for a training_step that takes the loader's iterator.
            for shows in (True, False):
                chosen = {name: value for name, value in metrics.items() if (name in shown) == shows}
                pl_module.log_dict(chosen, prog_bar=shows, batch_size=1)
        strategy.end_batch()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _strategy(trainer).flush()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _strategy(trainer).note_epoch_end(num_batches_trained(trainer))
        _strategy(trainer).flush()
        trainer.should_stop |= _strategy(trainer).has_ended

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _strategy(trainer).end_training()

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _strategy(trainer).share_metrics()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _strategy(trainer).share_metrics()

    @override
    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _strategy(trainer).share_metrics()

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _strategy(trainer).share_metrics()


def _strategy(trainer: Trainer) -> PipeSyncStrategyMixin[Any]:
    return cast("PipeSyncStrategyMixin[Any]", trainer.strategy)
