"""Callback hooks that the strategies need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipesync.core.private_names import ChecksOverrides
from lightning_pipesync.fabric.distribution import rank_zero_info
from lightning_pipesync.lightning.fit_summary import FitSummary
from lightning_pipesync.lightning.logged import log_hyperparameters, log_in_epoch, log_in_step
from lightning_pipesync.lightning.private import logs_this_batch, num_batches_trained
from lightning_pipesync.lightning.strategy import PipeSyncStrategyMixin

if TYPE_CHECKING:
    from lightning.pytorch import Callback as _Base
    from lightning.pytorch import LightningModule, Trainer
else:
    _Base = object


class PipeSyncCallbackMixin(ChecksOverrides, _Base):
    """Consolidates the weights before any other callback reads them, and logs what the method is and does.

    The strategies insert it as the first of the Trainer's callbacks.
    """

    _summary: FitSummary | None = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.enable_autolog_hparams:
            log_hyperparameters(trainer, _strategy(trainer).config, _strategy(trainer).name)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _strategy(trainer).check_num_batches()
        _strategy(trainer).join()
        self._summary = FitSummary(_strategy(trainer).attached, trainer.global_step)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _strategy(trainer).begin_epoch()

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
        if logs_this_batch(trainer):  # logging costs more than the rest of a local step
            log_in_step(pl_module, strategy.attached)
        strategy.end_batch()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _strategy(trainer).flush()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = _strategy(trainer)
        strategy.note_epoch_end(num_batches_trained(trainer))
        strategy.flush()
        if not trainer.barebones:
            log_in_epoch(pl_module, strategy.attached)
            strategy.share_metrics()
        trainer.should_stop |= strategy.has_ended

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _strategy(trainer).end_training()
        summary, self._summary = self._summary, None  # none, if the training began without this callback
        if summary is not None and (text := summary.text(trainer.global_step)) is not None:
            rank_zero_info(text)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        _strategy(trainer).report(exception)

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
