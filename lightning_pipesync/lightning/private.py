"""Private names of Lightning's Trainer and of torchmetrics: the only place that uses them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_pipesync.core.private_names import require
from lightning_pipesync.fabric.private import LIGHTNING

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torchmetrics import Metric


def check_trainer(trainer: Trainer, precision: Any) -> None:
    """Checks, before a training, that a Trainer and its precision plugin have what is read and set later.

    Raises:
        RuntimeError: they lack something.
    """
    require(trainer, "_logger_connector")
    require(trainer._logger_connector, "should_update_logs")
    require(trainer._logger_connector, "_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
    require(trainer.fit_loop, "_combined_loader", "_data_fetcher", "_should_accumulate")
    require(trainer.lightning_module, "_trainer")
    require(precision, "_after_closure", "clip_grad_by_norm", "clip_grad_by_value")


def change_train_loaders(trainer: Trainer, change: Callable[[DataLoader[Any]], DataLoader[Any]]) -> None:
    """Changes the training loaders, if they are set up already, and begins to iterate over them anew."""
    loaders, fetcher = trainer.fit_loop._combined_loader, trainer.fit_loop._data_fetcher
    if loaders is not None and fetcher is not None:
        loaders.flattened = [change(one) if isinstance(one, DataLoader) else one for one in loaders.flattened]
        iter(fetcher)


def run_hooks_before_step(precision: Any, module: Any, optimizer: Optimizer) -> None:
    """Does what a Trainer's precision plugin does between the backward pass and the update: hooks and clipping."""
    precision._after_closure(module, optimizer)


def logs_this_batch(trainer: Trainer) -> bool:
    """Returns, within ``on_train_batch_end``, whether the Trainer is about to hand this batch's metrics to loggers."""
    accumulates = trainer.lightning_module.automatic_optimization and trainer.fit_loop._should_accumulate()
    return not accumulates and trainer._logger_connector.should_update_logs


def saves_now(trainer: Trainer) -> bool:
    """Returns, within ``on_train_batch_end``, whether a ModelCheckpoint is about to save."""
    for callback in trainer.checkpoint_callbacks:
        of_lightning = (cls for cls in type(callback).__mro__ if cls.__module__.partition(".")[0] in LIGHTNING)
        if any(cls.__name__ == "ModelCheckpoint" for cls in of_lightning):
            require(callback, "_every_n_train_steps")
            period = callback._every_n_train_steps  # type: ignore[attr-defined]
            if period and trainer.global_step % period == 0:
                return True
    return False


def shown_metrics(trainer: Trainer) -> list[dict[str, Any]]:
    """Returns what was logged, by name: for callbacks, for loggers, for the progress bar."""
    return [dict(trainer.callback_metrics), dict(trainer.logged_metrics), dict(trainer.progress_bar_metrics)]


def show_metrics(trainer: Trainer, metrics: list[dict[str, Any]]) -> None:
    """Makes what :func:`shown_metrics` has returned on another rank the metrics of this one."""
    connector = trainer._logger_connector
    own: list[dict[str, Any]] = [
        connector._callback_metrics,
        connector._logged_metrics,
        connector._progress_bar_metrics,
    ]
    for mine, others in zip(own, metrics, strict=True):
        mine.update(others)


def accumulated(metric: Metric) -> tuple[dict[str, Any], int]:
    """Returns what a metric has accumulated, and from how many updates."""
    require(metric, "_update_count")
    return metric.metric_state, metric._update_count


def accumulate(metric: Metric, state: dict[str, Any], updates: int) -> None:
    """Has a metric be where another one was that :func:`accumulated` describes."""
    for name, value in state.items():
        setattr(metric, name, value)
    require(metric, "_update_count", "_computed")
    metric._update_count, metric._computed = updates, None


def keep_local(metric: Metric) -> None:
    """Has a metric never gather what other ranks have accumulated."""
    require(metric, "sync_on_compute", "_to_sync")
    metric.sync_on_compute = metric._to_sync = False


def without_rank(loader: DataLoader[Any]) -> None:
    """Has the workers of ``loader`` draw the same random numbers on all ranks, if Lightning has seeded them."""
    seeding = loader.worker_init_fn
    if isinstance(seeding, functools.partial) and seeding.func is pl_worker_init_function:
        loader.worker_init_fn = functools.partial(seeding.func, rank=0)


@contextmanager
def no_warning_about_resuming() -> Iterator[None]:
    """Keeps Lightning from saying that a loader without a ``state_dict`` cannot go on within an epoch: ours can."""
    warnings.filterwarnings("ignore", message=".*your dataloader is not resumable.*")
    ours = warnings.filters[0]
    try:
        yield
    finally:
        if ours in warnings.filters:
            warnings.filters.remove(ours)  # type: ignore[attr-defined]
