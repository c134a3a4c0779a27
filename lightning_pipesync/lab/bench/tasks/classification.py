"""Classification tasks."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from lightning_pipesync.lab.bench.tasks.task import Task


def classification(*, train_set: TensorDataset, **rest: Any) -> Task:
    """Returns a task whose quality is the accuracy in %.

    Args:
        train_set: inputs and labels.
        rest: the other arguments of :class:`Task`.
    """
    return Task(
        train_set=train_set,
        loss=classify,
        score=num_correct,
        quality=lambda share: 100 * share,
        metric="accuracy %",
        higher_is_better=True,
        labels=train_set.tensors[1],
        **rest,
    )


def classify(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Returns the loss on a batch of inputs and labels."""
    inputs, labels = batch
    return cross_entropy(module(inputs), labels)


def num_correct(module: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """Returns the number of correct predictions on a batch, and the size of the batch."""
    inputs, labels = batch
    return (module(inputs).argmax(dim=1) == labels).sum(), len(labels)
