"""Callback hooks that the strategies need, and what a method tells loggers, the progress bar and the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from statistics import fmean
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.core.private_names import ChecksOverrides
from lightning_pipesync.fabric.distribution import rank_zero_info
from lightning_pipesync.lightning.private import logs_this_batch, num_batches_trained, saved_hyperparameters
from lightning_pipesync.lightning.strategy import PipeSyncStrategyMixin
from lightning_pipesync.methods.method import NETWORK_METRICS, Method
from lightning_pipesync.methods.settings import Settings
from lightning_pipesync.training.registry import ADVISORS

if TYPE_CHECKING:
    from lightning.pytorch import Callback as _Base
    from lightning.pytorch import LightningModule, Trainer
else:
    _Base = object

#: What a rank sends beside steps is said if it is more than this share of what it sends in them.
WORTH_A_WORD = 0.05

#: The hyperparameter under which loggers get a method and its settings.
HYPERPARAMETER = "pipesync"


class PipeSyncCallbackMixin(ChecksOverrides, _Base):
    """Consolidates the weights before any other callback reads them, and logs what the method is and does.

    The strategies insert it as the first of the Trainer's callbacks.
    """

    _summary: FitSummary | None = None
    _advisor: Any = None  # while it records the first steps
    _advice: Any = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.enable_autolog_hparams:
            log_hyperparameters(trainer, _strategy(trainer).config, _strategy(trainer).name)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _strategy(trainer).check_num_batches()
        _strategy(trainer).join()
        self._summary = FitSummary(_strategy(trainer).attached, trainer.global_step)
        self._advisor = next((made for make in ADVISORS if (made := make(trainer, _strategy(trainer).attached))), None)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _strategy(trainer).begin_epoch()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        _strategy(trainer).note_epoch_end(None)
        _strategy(trainer).resume()
        if self._advisor is not None:
            self._advisor.begin_forward()

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._advisor is not None:
            self._advisor.begin_backward()

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._advisor is not None:
            self._advisor.begin_update()
        _strategy(trainer).after_backward(optimizer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        strategy = _strategy(trainer)
        if logs_this_batch(trainer):  # logging costs more than the rest of a local step
            log_in_step(pl_module, strategy.attached)
        strategy.end_batch()
        if self._advisor is not None and self._advisor.end():
            self._advice, self._advisor = self._advisor.advice(trainer.global_step), None
            if self._advice is not None:
                rank_zero_info(self._advice.line())

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
        if self._advice is not None and (line := self._advice.last_line(trainer.global_step)) is not None:
            rank_zero_info(line)
        self._dismiss_advisor()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        _strategy(trainer).report(exception)
        self._dismiss_advisor()

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _strategy(trainer).share_metrics()

    on_validation_end = on_validation_epoch_end
    on_test_epoch_end = on_validation_epoch_end
    on_test_end = on_validation_epoch_end

    def _dismiss_advisor(self) -> None:
        if self._advisor is not None:
            self._advisor.close()
        self._advisor = self._advice = None


def _strategy(trainer: Trainer) -> PipeSyncStrategyMixin[Any]:
    return cast("PipeSyncStrategyMixin[Any]", trainer.strategy)


def log_hyperparameters(trainer: Trainer, config: Settings, name: str) -> None:
    """Gives loggers the method and its settings, with the hyperparameters that the Trainer gives them next.

    TensorBoard shows only what it gets first.
    """
    values = {field.name: _plain(getattr(config, field.name)) for field in fields(config)}
    chosen = {key: value for key, value in values.items() if key not in config.set_by_trainer}
    for logger in trainer.loggers:
        logger.log_hyperparams({**saved_hyperparameters(trainer), HYPERPARAMETER: {"method": name, **chosen}})


def log_in_step(module: LightningModule, method: Method) -> None:
    """Logs this rank's metrics after a batch; those in which ranks may differ are named by the rank."""
    rank = module.trainer.global_rank

    def key(name: str) -> str:
        return f"{name}/rank_{rank}" if method.metric_info(name).differs else name

    _log(module, method, method.metrics(), key)


def log_in_epoch(module: LightningModule, method: Method) -> None:
    """Logs the metrics at the end of an epoch, reduced over the ranks; a collective call."""
    # They are reduced already, so that Lightning shall neither reduce them (rank_zero_only) nor warn (sync_dist).
    _log(module, method, method.reduced_metrics(), str, sync_dist=True, rank_zero_only=True)


def _log(
    module: LightningModule, method: Method, metrics: Mapping[str, float], key: Callable[[str], str], **how: Any
) -> None:
    # Without a batch_size, Lightning refuses to log for a training_step that takes the loader's iterator.
    module.log_dict({f"{method.name}/{key(name)}": value for name, value in metrics.items()}, batch_size=1, **how)
    shown = {short: metrics[name] for name, short in method.shown_metrics.items() if name in metrics}
    module.log_dict(shown, prog_bar=True, logger=False, batch_size=1, **how)


def _plain(value: Any) -> Any:
    """Returns a setting as a value that every logger and a YAML file can hold."""
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


class FitSummary:
    """Counts what a method does from now on.

    Args:
        method: the method that is about to train.
        num_steps: the number of optimizer steps before.
    """

    def __init__(self, method: Method, num_steps: int) -> None:
        assert method.transport is not None  # only virtual stages have none
        self._method, self._transport = method, method.transport
        self._num_steps, self._metrics = num_steps, method.metrics()
        self._began = perf_counter()

    def text(self, num_steps: int) -> str | None:
        """Returns the line, on rank 0; None on others, and if no step was taken. A collective call.

        What is sent and waited is reduced over the ranks as in the metrics. With NCCL, streams wait, which is not
        counted, so that the line says nothing about waiting.

        Args:
            num_steps: the number of optimizer steps now.
        """
        method, transport = self._method, self._transport
        seconds, now = perf_counter() - self._began, method.metrics()
        own = num_steps - self._num_steps, *(now[name] - self._metrics[name] for name in NETWORK_METRICS)
        numbers, *of_ranks = zip(*transport.job.gather_objects(own), strict=True)
        infos, steps = NETWORK_METRICS.values(), fmean(numbers)
        sent, beside, waited = (info.reduce(values) for info, values in zip(infos, of_ranks, strict=True))
        if steps == 0 or transport.job.rank != 0:
            return None
        text = f"{type(method).__name__}: {method.summary(round(steps), self._metrics)}"
        if transport.job.world_size > 1 and method.counts_traffic:
            text += f"; each rank sent {_mib(sent)}"
            if method.ddp_bytes is not None:
                text += f", where DDP sends at least {_mib(steps * method.ddp_bytes / MIB)}"
            if beside > WORTH_A_WORD * sent:
                text += f"; besides, {_mib(beside)} to measure or consolidate"
            if transport.backend != "nccl":
                text += f"; training waited for the network {waited / seconds:.0%} of the time"
        return f"{text}."


def _mib(mib: float) -> str:
    return f"{mib:.2g} MiB" if mib < 10 else f"{mib:,.0f} MiB"
