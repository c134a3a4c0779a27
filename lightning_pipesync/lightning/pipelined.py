"""Checks, random state and metrics of a Trainer whose processes each have a part of one model."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_pipesync.core.torch_private import map_tensors
from lightning_pipesync.fabric.private import scaler_of
from lightning_pipesync.lightning.distribution import is_param_in_hook_signature
from lightning_pipesync.lightning.private import (
    accumulate,
    accumulated,
    check_monitored_times,
    show_metrics,
    shown_metrics,
)

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins.precision import Precision

#: Broadcasts an object from rank 0.
Broadcast = Callable[[Any], Any]
#: Callbacks that average the weights of a whole model.
AVERAGING = ("WeightAveraging", "StochasticWeightAveraging")


def check_training(trainer: Trainer, precision: Precision, name: str) -> None:
    """Checks that a pipeline, the strategy of that name, can train the Trainer's module."""
    if not trainer.lightning_module.automatic_optimization:
        raise ValueError(
            f"strategy={name!r} makes the backward passes itself, outside of training_step: set "
            "self.automatic_optimization = True."
        )
    if is_param_in_hook_signature(trainer.lightning_module.training_step, "dataloader_iter", explicit=True):
        raise ValueError(
            f"strategy={name!r} runs training_step twice for each batch, which needs a batch as its argument, not the "
            "loader's iterator: write training_step(batch, batch_idx)."
        )
    if scaler_of(precision) is not None:
        raise ValueError(
            "precision='16-mixed' scales the loss, and the mini-batches in flight would have different loss scales: "
            "set precision='bf16-mixed' or '32-true'."
        )
    check_monitored_times(trainer, name)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if any(cls.__name__ in AVERAGING for cls in type(callback).__mro__):
            raise ValueError(
                f"{type(callback).__name__} averages the weights of a whole model, and each process has only some of "
                f"its layers: remove the callback. The weights of strategy={name!r} are an average already."
            )


def broadcast_rng_state(broadcast: Broadcast) -> None:
    """Broadcasts rank 0's random states, so that data sets and steps draw the same numbers on all ranks."""
    of_torch, of_numpy, of_python = broadcast((torch.get_rng_state(), np.random.get_state(), random.getstate()))
    torch.set_rng_state(of_torch)
    np.random.set_state(of_numpy)
    random.setstate(of_python)


def metrics_of(module: nn.Module) -> list[Metric]:
    return [child for child in module.modules() if isinstance(child, Metric)]


@contextmanager
def leaving_logs_to_rank_0(module: LightningModule) -> Iterator[None]:
    """Context manager for ranks other than 0: the module logs nothing, and errors of its epoch-end hooks say why.

    The hooks run on all ranks, since they may change the layers. Only rank 0 completes steps, so on other ranks the
    hooks find no results of steps.
    """
    names = [f"on_{stage}_epoch_end" for stage in ("train", "validation", "test", "predict")]
    module.log = lambda *_, **__: None  # type: ignore[method-assign]
    for name in names:
        setattr(module, name, partial(_run_without_results, name, getattr(module, name)))
    try:
        yield
    finally:
        for name in ("log", *names):
            delattr(module, name)


def _run_without_results(name: str, hook: Callable[[], None]) -> None:
    try:
        hook()
    except Exception as error:
        raise RuntimeError(
            f"{name} raised {type(error).__name__} on a rank that completes no steps: {error}. The hook runs on all "
            "ranks, and only rank 0 has the results of steps: use them only if self.trainer.is_global_zero."
        ) from error


@contextmanager
def sharing_logs_of_epochs(module: LightningModule, share: Callable[[], object]) -> Iterator[None]:
    """Context manager in which ``share`` follows the module's ``on_train_epoch_end``.

    ModelCheckpoint and EarlyStopping, which read what it has logged, come next, and only rank 0 has logged.
    """
    hook, own = module.on_train_epoch_end, vars(module).get("on_train_epoch_end")

    def hook_and_share() -> None:
        hook()
        share()

    module.on_train_epoch_end = hook_and_share  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.on_train_epoch_end
        if own is not None:
            module.on_train_epoch_end = own  # type: ignore[method-assign]


def adopt_metrics(trainer: Trainer, broadcast: Broadcast) -> None:
    """Broadcasts rank 0's logged metrics and the states of its metric objects."""
    metrics = metrics_of(trainer.lightning_module)
    mine = shown_metrics(trainer), [accumulated(metric) for metric in metrics]
    shown, states = broadcast(map_tensors(Tensor.cpu, mine))
    if trainer.global_rank != 0:
        show_metrics(trainer, shown)
        for metric, (state, updates) in zip(metrics, states, strict=True):
            accumulate(metric, map_tensors(methodcaller("to", metric.device), state), updates)


def loss_of(result: Any) -> Tensor:
    loss = result.get("loss") if isinstance(result, dict) else result
    if not isinstance(loss, Tensor):
        raise RuntimeError(f"training_step must return a loss for every batch of a pipeline, got {result!r}.")
    return loss
