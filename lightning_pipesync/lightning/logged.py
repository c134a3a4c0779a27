"""What loggers and the progress bar get of a method: its metrics, and its settings among the hyperparameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from lightning_pipesync.lightning.private import saved_hyperparameters
from lightning_pipesync.methods.method import Method
from lightning_pipesync.methods.settings import Settings

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

#: The hyperparameter under which loggers get a method and its settings.
HYPERPARAMETER = "pipesync"


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
