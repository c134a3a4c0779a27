"""Callback hooks that the strategies need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipesync.core.private_names import ChecksOverrides
from lightning_pipesync.lightning.private import logs_this_batch, num_batches_trained, saves_now

if TYPE_CHECKING:
    from lightning.pytorch import Callback as _Base
    from lightning.pytorch import LightningModule, Trainer

    from lightning_pipesync.lightning.pipeline import PipelineStrategyMixin
    from lightning_pipesync.lightning.strategy import PipeSyncStrategyMixin
else:
    _Base = object


class PipeSyncCallbackMixin(ChecksOverrides, _Base):
    """Consolidates the weights before any other callback reads them, and logs the method's metrics.

    The strategies insert it as the first of the Trainer's callbacks.
    """

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks that all ranks have the same number of training batches.

        Raises:
            ValueError: the numbers differ: ranks with more batches would wait for the others for ever.
        """
        method = _strategy(trainer).method
        assert method is not None
        assert method.transport is not None
        num_batches = method.transport.gather_objects(trainer.num_training_batches)
        if len(set(num_batches)) > 1:
            raise ValueError(
                f"The ranks have different numbers of training batches, by rank: {num_batches}. Give every rank the "
                "same number of samples, or set Trainer(limit_train_batches=...) to the smallest number."
            )

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
        if not trainer.is_last_batch and not logs_this_batch(trainer):
            return  # logging costs more than everything else that a local step adds
        strategy = _strategy(trainer)
        assert strategy.method is not None
        metrics = {f"{strategy.name}/{name}": value for name, value in strategy.method.metrics().items()}
        shown = {f"{strategy.name}/{name}" for name in strategy.method.shown_metrics}
        # Without a batch_size, Lightning refuses to log for a training_step that takes the loader's iterator.
        for shows in (True, False):
            chosen = {name: value for name, value in metrics.items() if (name in shown) == shows}
            pl_module.log_dict(chosen, prog_bar=shows, batch_size=1)

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


class PipelineCallbackMixin(PipeSyncCallbackMixin):
    """Broadcasts rank 0's logged metrics before any other callback reads them."""

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_rank == 0:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if saves_now(trainer):
            _strategy(trainer).flush()

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _pipeline(trainer).share_metrics()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _pipeline(trainer).share_metrics()

    @override
    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _pipeline(trainer).share_metrics()

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _pipeline(trainer).share_metrics()


def _strategy(trainer: Trainer) -> PipeSyncStrategyMixin:
    return cast("PipeSyncStrategyMixin", trainer.strategy)


def _pipeline(trainer: Trainer) -> PipelineStrategyMixin:
    return cast("PipelineStrategyMixin", trainer.strategy)
