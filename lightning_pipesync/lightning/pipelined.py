"""What a Trainer needs whose processes each have a part of one model: the same data, the same metrics."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_pipesync.core.torch_private import map_tensors
from lightning_pipesync.fabric.private import scaler_of
from lightning_pipesync.lightning.private import accumulate, accumulated, show_metrics, shown_metrics

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins.precision import Precision

#: Copies an object of rank 0 to all ranks.
Broadcast = Callable[[Any], Any]
#: Callbacks that average weights, of which a rank has but a part.
AVERAGING = ("WeightAveraging", "StochasticWeightAveraging")


def check_training(trainer: Trainer, precision: Precision) -> None:
    """Checks that a pipeline can train the Trainer's module.

    Raises:
        ValueError: it cannot; the message says what to change.
    """
    if not trainer.lightning_module.automatic_optimization:
        raise ValueError(
            "strategy='ea_pipe' makes the backward passes itself, at other times than training_step: set "
            "self.automatic_optimization = True."
        )
    if is_param_in_hook_signature(trainer.lightning_module.training_step, "dataloader_iter", explicit=True):
        raise ValueError(
            "strategy='ea_pipe' runs training_step on two stages for each batch, and cannot for one that takes the "
            "loader's iterator: have it take a batch."
        )
    if scaler_of(precision) is not None:
        raise ValueError(
            "precision='16-mixed' scales the loss, and mini-batches in flight would have different scales: set "
            "precision='bf16-mixed' or '32-true'."
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if any(cls.__name__ in AVERAGING for cls in type(callback).__mro__):
            raise ValueError(
                f"{type(callback).__name__} averages the weights of a whole model, and each process has some of its "
                "layers: leave it out. The master of strategy='ea_pipe' is an average already."
            )


def draw_alike(broadcast: Broadcast) -> None:
    """Has all ranks draw rank 0's random numbers from now on: those of data sets, and of steps outside the layers."""
    states = broadcast((torch.get_rng_state(), np.random.get_state(), random.getstate()))
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


def metrics_of(module: nn.Module) -> list[Metric]:
    """Returns the metric objects that the module holds."""
    return [child for child in module.modules() if isinstance(child, Metric)]


@contextmanager
def leaving_logs_to_rank_0(module: LightningModule) -> Iterator[None]:
    """Within it the module logs nothing, and what its hooks at the end of an epoch raise is a warning.

    They run on all ranks, since they may change the layers; but other ranks than 0 run no step to its end, and have
    nothing that steps have collected.
    """
    names = [f"on_{stage}_epoch_end" for stage in ("train", "validation", "test", "predict")]
    module.log = lambda *_, **__: None  # type: ignore[method-assign]
    for name in names:
        setattr(module, name, partial(_forgiven, name, getattr(module, name)))
    try:
        yield
    finally:
        for name in ("log", *names):
            delattr(module, name)


def _forgiven(name: str, hook: Callable[[], None]) -> None:
    try:
        hook()
    except Exception as error:
        warnings.warn(
            f"{name} raised {type(error).__name__} on a rank that has not the last stage, where no step is run to its "
            f"end, and that is ignored: {error}",
            stacklevel=1,
        )


def adopt_metrics(trainer: Trainer, broadcast: Broadcast) -> None:
    """Has all ranks know what rank 0 has logged, and what its metric objects have accumulated."""
    metrics = metrics_of(trainer.lightning_module)
    mine = shown_metrics(trainer), [accumulated(metric) for metric in metrics]
    shown, states = broadcast(map_tensors(Tensor.cpu, mine))
    if trainer.global_rank != 0:
        show_metrics(trainer, shown)
        for metric, (state, updates) in zip(metrics, states, strict=True):
            accumulate(metric, map_tensors(methodcaller("to", metric.device), state), updates)


def loss_of(result: Any) -> Tensor:
    """Returns the loss in what ``training_step`` has returned.

    Raises:
        RuntimeError: there is none.
    """
    loss = result.get("loss") if isinstance(result, dict) else result
    if not isinstance(loss, Tensor):
        raise RuntimeError(f"training_step must return a loss for every batch of a pipeline, got {result!r}.")
    return loss


def without_graph(result: Any) -> Any:
    """Returns what ``training_step`` has returned, its tensors detached."""
    return map_tensors(Tensor.detach, result)
