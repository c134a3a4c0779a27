"""The only module that uses private names of Lightning's Trainer and of torchmetrics."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any, cast

from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_pipesync.core.private_names import require, with_attributes
from lightning_pipesync.fabric.distribution import pl_worker_init_function
from lightning_pipesync.fabric.private import LIGHTNING

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.loops.progress import _ProcessedTracker
    from torchmetrics import Metric


def check_trainer(trainer: Trainer, precision: Any) -> None:
    """Raises a RuntimeError, before a training, if a Trainer or its precision plugin lacks a private name."""
    require(trainer, "_logger_connector")
    require(trainer._logger_connector, "should_update_logs")
    require(trainer._logger_connector, "_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
    require(trainer.fit_loop, "_combined_loader", "_data_fetcher", "_restarting", "_should_accumulate")
    require(trainer.lightning_module, "_trainer")
    require(precision, "_after_closure", "clip_grad_by_norm", "clip_grad_by_value")


def check_clocks(trainer: Trainer) -> None:
    """Checks that no rank validates by its own clock: it would wait for those that train on."""
    seconds = getattr(trainer, "_val_check_time_interval", None)
    if trainer.world_size > 1 and seconds is not None:
        raise ValueError(
            f"Trainer(val_check_interval=...) is a time, of {seconds:g} s, and each rank looks at its own clock: those "
            "that validate would wait for those that train. Give a number of batches, or a share."
        )


#: What may end, or interrupt, a training of ranks that have come to different steps, and whether a Trainer uses it.
USES: dict[str, Callable[[Trainer], bool]] = {
    "Trainer(max_time=...)": lambda trainer: _has(trainer, "Timer"),
    "Trainer(min_steps=...)": lambda trainer: bool(trainer.min_steps),
    "Trainer(val_check_interval=...)": lambda trainer: trainer.val_check_interval != 1.0,
    "Trainer(overfit_batches=...)": lambda trainer: bool(trainer.overfit_batches),  # type: ignore[attr-defined]
    # Of one batch each rank has its own, as with fast_dev_run=True.
    "Trainer(limit_train_batches=...)": lambda trainer: trainer.limit_train_batches != 1,
    "ModelCheckpoint(every_n_train_steps=...)": lambda trainer: any(map(_period_of, _model_checkpoints(trainer))),
    "ModelCheckpoint(train_time_interval=...)": lambda trainer: any(map(_saves_by_time, _model_checkpoints(trainer))),
    "The search for a learning rate": lambda trainer: _has(trainer, "LearningRateFinder", "_LRCallback"),
}
#: What has all ranks agree after each batch.
AGREEMENTS = ("Trainer(max_time=...)", "ModelCheckpoint(train_time_interval=...)", "The search for a learning rate")


def check_agreements(trainer: Trainer, name: str) -> None:
    """Checks that no feature needs a collective after each batch, where ranks do not wait for each other."""
    _refuse(
        trainer,
        AGREEMENTS,
        f"has all ranks agree after each batch, and with strategy={name!r} and this policy they do not wait for each "
        "other: some would wait there for a rank that needs their gradients. Count steps or epochs instead, or set "
        "policy='sync'.",
    )


def check_uneven_batches(trainer: Trainer) -> None:
    """Checks that nothing that all ranks do together depends on how many batches one rank has had."""
    _refuse(
        trainer,
        [what for what in USES if what != "The search for a learning rate"],
        "counts the steps of a rank, and with partition='work_queue' ranks take different numbers of them: count in "
        "epochs (max_epochs, check_val_every_n_epoch, every_n_epochs), or set partition='defdp'.",
    )


def _refuse(trainer: Trainer, features: Iterable[str], why: str) -> None:
    for what in features:
        if USES[what](trainer):
            raise ValueError(f"{what} {why}")


def _saves_by_time(callback: Any) -> bool:
    require(callback, "_train_time_interval")
    return callback._train_time_interval is not None


def _period_of(callback: Any) -> int:
    """Returns after how many steps a ModelCheckpoint saves; 0: it does not count steps."""
    require(callback, "_every_n_train_steps")
    return max(0, callback._every_n_train_steps)


def check_monitored_times(trainer: Trainer, name: str) -> None:
    """Checks that no ModelCheckpoint compares, at a time, what only one rank has logged then."""
    if any(callback.monitor is not None and _saves_by_time(callback) for callback in _model_checkpoints(trainer)):
        raise ValueError(
            "ModelCheckpoint(monitor=..., train_time_interval=...) compares a metric at a time that nobody foresees, "
            f"and with strategy={name!r} only rank 0 has it then: leave out one of them, or save every so many steps."
        )


def set_device_mesh(module: LightningModule, mesh: DeviceMesh) -> None:
    """Makes ``mesh`` the ``device_mesh`` of a module, which ``configure_model`` reads."""
    require(module, "_device_mesh")
    module._device_mesh = mesh


def has_swa(trainer: Trainer) -> bool:
    """Returns whether the Trainer has a StochasticWeightAveraging."""
    return _has(trainer, "StochasticWeightAveraging")


def writes_average_within_training(trainer: Trainer) -> bool:
    """Returns whether StochasticWeightAveraging will write its average in the midst of a training, for BatchNorm."""
    return has_swa(trainer) and any(isinstance(child, _BatchNorm) for child in trainer.lightning_module.modules())


def name_refused_copies(trainer: Trainer, refusal: Callable[[str], Exception]) -> None:
    """Makes WeightAveraging, or a derived callback, raise ``refusal(its name)`` where FSDP2 refuses to be copied."""
    for callback in vars(trainer)["callbacks"]:
        if _is_lightnings(callback, "WeightAveraging"):
            callback.setup = functools.partial(_set_up_or_name, callback, refusal)


def _set_up_or_name(callback: Any, refusal: Callable[[str], Exception], *args: Any, **kwargs: Any) -> None:
    del vars(callback)["setup"]
    try:
        callback.setup(*args, **kwargs)
    except AssertionError as error:
        if "deepcopy" not in str(error):
            raise
        raise refusal(type(callback).__name__) from error


def change_train_loaders(trainer: Trainer, change: Callable[[DataLoader[Any]], DataLoader[Any]]) -> None:
    """Changes the training loaders, if they are set up already, and restarts the iteration over them."""
    loaders, fetcher = trainer.fit_loop._combined_loader, trainer.fit_loop._data_fetcher
    if loaders is not None and fetcher is not None:
        known = loaders.flattened
        loaders.flattened = [change(loader) if isinstance(loader, DataLoader) else loader for loader in known]
        iter(fetcher)


def num_train_loaders(trainer: Trainer) -> int:
    loaders = trainer.fit_loop._combined_loader
    return 0 if loaders is None else len(loaders.flattened)


def check_progress(trainer: Trainer) -> None:
    """Raises a RuntimeError, before a training, if the Trainer's loops lack a private name of their progress."""
    loop = trainer.fit_loop.epoch_loop
    require(loop, "batch_progress", "scheduler_progress", "_batches_that_stepped")
    require(loop.automatic_optimization, "optim_progress")
    require(loop.manual_optimization, "optim_step_progress")


def position_of(trainer: Trainer) -> tuple[int, int]:
    """Returns the epoch, and how many of its batches were trained on, with the present one."""
    epochs = cast("_ProcessedTracker", trainer.fit_loop.epoch_progress.current)
    return epochs.processed, num_batches_trained(trainer) if epochs.started > epochs.processed else 0


def progress_of(trainer: Trainer) -> dict[str, Any]:
    """Returns the progress of the Trainer's loops as it will be after the present batch.

    It is that of a checkpoint which is saved after that batch, or, if it is the last one of its epoch, at the start of
    the next epoch.
    """
    progress = deepcopy(trainer.fit_loop.state_dict())
    batches, epochs = progress["epoch_loop.batch_progress"], progress["epoch_progress"]
    steps = [
        progress["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"],
        progress["epoch_loop.manual_optimization.optim_step_progress"],
    ]
    for part in ("total", "current"):
        batches[part]["processed"] = batches[part]["started"]
        for step in steps:
            step[part]["completed"] = step[part]["ready"]
    if not batches["is_last_batch"] and epochs["total"]["started"] > epochs["total"]["processed"]:
        return progress
    if batches["total"]["completed"] < batches["total"]["processed"]:
        progress["epoch_loop.state_dict"]["_batches_that_stepped"] += 1
    batches["total"] |= {"completed": batches["total"]["ready"]}
    for present in (batches, progress["epoch_loop.scheduler_progress"], *steps):
        present["current"] = dict.fromkeys(present["current"], 0)
    batches["is_last_batch"] = False
    for part in ("total", "current"):
        epochs[part] = dict.fromkeys(epochs[part], epochs[part]["started"])
    return progress


def go_to_progress(trainer: Trainer, progress: dict[str, Any]) -> None:
    """Continues from :func:`progress_of` another Trainer; called in ``on_train_start``."""
    loop = trainer.fit_loop
    loop.load_state_dict(progress)
    loop.reset()
    epochs = cast("_ProcessedTracker", loop.epoch_progress.current)
    if trainer.max_steps == -1:
        epochs.completed = epochs.processed
    if epochs.started == epochs.processed:  # otherwise Lightning looks for what is left of an epoch, also of none
        loop._restarting = loop.epoch_loop.restarting = False


def skip_ended_epoch(trainer: Trainer) -> bool:
    """Begins the next epoch if no batch is left of the one of :func:`go_to_progress`; returns whether it does."""
    if not 0 < trainer.fit_loop.max_batches <= position_of(trainer)[1]:
        return False
    trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = True
    go_to_progress(trainer, progress_of(trainer))
    return True


def begin_next_epoch(trainer: Trainer) -> None:
    """Begins an epoch if a checkpoint was saved at the last batch of the one before; called in ``on_train_start``.

    Lightning would count one epoch less from there on than it has begun.
    """
    batches = cast("_ProcessedTracker", trainer.fit_loop.epoch_loop.batch_progress.total)
    if batches.completed < batches.processed and position_of(trainer)[1] == 0:
        go_to_progress(trainer, progress_of(trainer))


def restart_train_loader(trainer: Trainer) -> None:
    """Begins another iteration over the training loader, whose order has changed, if it is set up already."""
    loop, fetcher = trainer.fit_loop, trainer.fit_loop._data_fetcher
    if fetcher is None:
        return
    set_num_batches(trainer)
    iter(fetcher)
    batches = loop.epoch_loop.batch_progress
    current = cast("_ProcessedTracker", batches.current)
    if current.started > current.processed:  # within a batch; otherwise the loop does it
        fetcher.fetched += current.ready
        fetcher.done = fetcher.fetched >= loop.max_batches
        batches.is_last_batch |= fetcher.done


def set_num_batches(trainer: Trainer) -> None:
    """Sets the number of batches of the epoch to what the one training loader now says, and when validation is due."""
    loop, limit = trainer.fit_loop, trainer.limit_train_batches
    loaders = loop._combined_loader
    if loaders is None:
        return
    lengths = [len(loader) for loader in loaders.flattened]
    loaders.limits = [int(length * limit) if isinstance(limit, float) else min(length, limit) for length in lengths]
    loop.max_batches = max(loaders.limits)  # its own length is that of the present iteration
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        return
    if isinstance(trainer.val_check_interval, float):
        trainer.val_check_batch = max(1, int(loop.max_batches * trainer.val_check_interval))
    elif trainer.check_val_every_n_epoch is not None:  # an epoch that is shorter than the interval is validated, too
        trainer.val_check_batch = min(trainer.val_check_interval, loop.max_batches)


def run_hooks_before_step(precision: Any, module: Any, optimizer: Optimizer) -> None:
    """Runs the Trainer's hooks and clipping between the backward pass and the update."""
    precision._after_closure(module, optimizer)


def logs_this_batch(trainer: Trainer) -> bool:
    """Returns, within ``on_train_batch_end``, whether the Trainer will log this batch's metrics."""
    accumulates = trainer.lightning_module.automatic_optimization and trainer.fit_loop._should_accumulate()
    return not accumulates and trainer._logger_connector.should_update_logs


def saved_hyperparameters(trainer: Trainer) -> dict[str, Any]:
    """Returns the hyperparameters of the module and the data module that the Trainer gives to loggers."""
    found: dict[str, Any] = {}
    for owner in (trainer.lightning_module, trainer.datamodule):  # type: ignore[attr-defined]
        if owner is not None:
            require(owner, "_log_hyperparams")
            found |= owner.hparams_initial if owner._log_hyperparams else {}
    return {name: value for name, value in found.items() if name != "_class_path"}  # which is LightningCLI's own


def saves_now(trainer: Trainer) -> bool:
    """Returns, within ``on_train_batch_end``, whether a ModelCheckpoint will save after this batch."""
    periods = map(_period_of, _model_checkpoints(trainer))
    return any(period and trainer.global_step % period == 0 for period in periods)


def num_batches_trained(trainer: Trainer) -> int:
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready


def _model_checkpoints(trainer: Trainer) -> Iterator[Any]:
    for callback in trainer.checkpoint_callbacks:
        if _is_lightnings(callback, "ModelCheckpoint"):
            yield callback


def _has(trainer: Trainer, *names: str) -> bool:
    """Returns whether the Trainer has a callback of one of Lightning's classes with these names."""
    return any(_is_lightnings(callback, name) for callback in vars(trainer)["callbacks"] for name in names)


def _is_lightnings(callback: object, name: str) -> bool:
    """Returns whether an object is of the class with this name in either distribution, or of a derived class."""
    of_lightning = (cls for cls in type(callback).__mro__ if cls.__module__.partition(".")[0] in LIGHTNING)
    return any(cls.__name__ == name for cls in of_lightning)


def shown_metrics(trainer: Trainer) -> list[dict[str, Any]]:
    """Returns the logged metrics by name: those for callbacks, for loggers, and for the progress bar."""
    return [dict(trainer.callback_metrics), dict(trainer.logged_metrics), dict(trainer.progress_bar_metrics)]


def show_metrics(trainer: Trainer, metrics: list[dict[str, Any]]) -> None:
    """Updates this rank's logged metrics with another rank's."""
    connector = trainer._logger_connector
    shown = [connector._callback_metrics, connector._logged_metrics, connector._progress_bar_metrics]
    for mine, others in zip(shown, metrics, strict=True):
        mine.update(others)  # type: ignore[attr-defined]


def accumulated(metric: Metric) -> tuple[dict[str, Any], int]:
    require(metric, "_update_count")
    return metric.metric_state, metric._update_count


def accumulate(metric: Metric, state: dict[str, Any], updates: int) -> None:
    """Sets the state of a metric to what :func:`accumulated` returned of another one."""
    for name, value in state.items():
        setattr(metric, name, value)
    require(metric, "_update_count", "_computed")
    metric._update_count, metric._computed = updates, None


def kept_local(metric: Metric) -> AbstractContextManager[None]:
    """Returns a context manager in which a metric is not synchronized across ranks."""
    require(metric, "sync_on_compute", "_to_sync")
    return with_attributes(metric, sync_on_compute=False, _to_sync=False)


def without_rank(loader: DataLoader[Any]) -> None:
    """Seeds the workers of ``loader`` alike on all ranks, if Lightning seeds them."""
    seeding = loader.worker_init_fn
    if isinstance(seeding, functools.partial) and seeding.func is pl_worker_init_function:
        loader.worker_init_fn = functools.partial(seeding.func, rank=0)


def no_broadcast_of_signals(trainer: Trainer) -> AbstractContextManager[None]:
    """Removes the broadcast before each batch of whether rank 0 has a SIGTERM, for which all ranks would wait.

    A rank that has one itself still ends after its batch.
    """
    loop = trainer.fit_loop.epoch_loop
    require(loop, "_broadcast_sigterm_tensor")
    return with_attributes(loop, _broadcast_sigterm_tensor=lambda: None)


def no_broadcast_in_handlers(trainer: Trainer, handles: Callable[[int, Any], bool]) -> AbstractContextManager[None]:
    """Makes a SIGTERM end this rank after its batch, as Lightning does, without a broadcast in its handler.

    In that, a rank would wait for rank 0 in the midst of a step, for which rank 0 may wait itself. ``handles`` gets the
    handler's arguments; if it returns True, the rank does not end before :func:`end_after_batch`.
    """
    connector = trainer._signal_connector
    require(connector, "_sigterm_notifier_fn", "received_sigterm")

    def note(number: int, frame: Any) -> None:
        launcher = trainer.strategy.launcher
        if launcher is not None and not connector.received_sigterm:
            launcher.kill(number)
        if not handles(number, frame):
            connector.received_sigterm = True

    return with_attributes(connector, _sigterm_notifier_fn=note)


def end_after_batch(trainer: Trainer) -> None:
    """Ends this rank after its batch, as after a SIGTERM."""
    trainer._signal_connector.received_sigterm = True


@contextmanager
def no_warning_about_resuming() -> Iterator[None]:
    """Suppresses Lightning's warning that a loader without ``state_dict`` cannot resume within an epoch: ours can."""
    warnings.filterwarnings("ignore", message=".*your dataloader is not resumable.*")
    ours = warnings.filters[0]
    try:
        yield
    finally:
        if ours in warnings.filters:
            warnings.filters.remove(ours)  # type: ignore[attr-defined]
