"""A task: a model, its data, its optimizer and its target quality."""

from __future__ import annotations

from collections.abc import Callable, Sized
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, Subset, TensorDataset

#: The part of the training data that is held out for validation.
VALIDATION_SHARE = 0.1


@dataclass(frozen=True)
class Task:
    """A training without the communication of its ranks."""

    #: The name in ``TASKS``.
    name: str
    #: Builds the model; its weights come from torch's global generator.
    build_module: Callable[[], nn.Module]
    #: Divided among the ranks.
    train_set: Dataset[Any]
    #: The quality is measured on it.
    test_set: Dataset[Any]
    #: Samples of each rank in a step.
    batch_size: int
    #: The number of passes of a rank over its share of ``train_set``.
    epochs: int
    #: Returns the loss (0-dim) of a module, or a wrapper of it, on a batch.
    loss: Callable[[nn.Module, Any], Tensor]
    #: Returns the sum of the scores of a module on a batch, and their number.
    score: Callable[[nn.Module, Any], tuple[Tensor, int]]
    #: Returns the quality from the mean score.
    quality: Callable[[float], float]
    #: The name of the quality.
    metric: str
    #: Whether a higher quality is a better one.
    higher_is_better: bool
    #: The default of the quality to reach.
    target: float
    #: Returns the optimizer of a module.
    optimizer: Callable[[nn.Module], Optimizer]
    #: Returns the scheduler of an optimizer for a number of steps, stepped after every step.
    scheduler: Callable[[Optimizer, int], LRScheduler]
    #: The norm to which the gradient is clipped; None: no clipping.
    max_norm: float | None = None
    #: The labels of the samples of ``train_set``; None: there are none.
    labels: Tensor | None = None
    #: The number of labels that each rank holds; None: a sampler gives each rank an equal share.
    labels_per_worker: int | None = None

    @classmethod
    def classification(cls, *, train_set: TensorDataset, **rest: Any) -> Task:
        """Returns a task whose quality is the accuracy in %, on inputs and labels."""
        shown: dict[str, Any] = {"quality": lambda share: 100 * share, "metric": "accuracy %", "higher_is_better": True}
        labels = train_set.tensors[1]
        return cls(train_set=train_set, labels=labels, loss=_cross_entropy, score=_num_correct, **shown, **rest)

    def divided(self, share: float) -> tuple[Tensor, Tensor]:
        """Splits the indices of ``train_set`` into a part of this share and the rest, with a fixed seed."""
        order = torch.randperm(len(cast(Sized, self.train_set)), generator=torch.Generator().manual_seed(0))
        number = round(share * len(order))
        return order[:number], order[number:]

    def with_validation(self) -> Task:
        """Returns the task with a fixed part of its training data as the test set, to choose settings on.

        The model trains on the rest, for every seed of the training.
        """
        held_back, kept = (part.sort().values for part in self.divided(VALIDATION_SHARE))
        return replace(
            self,
            train_set=Subset(self.train_set, kept.tolist()),
            test_set=Subset(self.train_set, held_back.tolist()),
            labels=None if self.labels is None else self.labels[kept],
        )

    def with_label_skew(self, labels_per_worker: int) -> Task:
        """Returns the task with non-IID data: each rank holds ``labels_per_worker`` labels (SelSync IV-A)."""
        if self.labels is None:
            raise ValueError(f"labels_per_worker={labels_per_worker}: the samples of {self.name!r} have no labels.")
        num_labels = len(self.labels.unique())
        if not 1 <= labels_per_worker <= num_labels:
            raise ValueError(
                f"labels_per_worker={labels_per_worker} must be from 1 to {num_labels}, the labels there are."
            )
        return replace(self, labels_per_worker=labels_per_worker)


def evaluations(num_steps: int, number: int) -> set[int]:
    """Returns the ``number`` steps after which the quality is measured; the last is the end of the training."""
    return {round((i + 1) * num_steps / number) for i in range(number)}


def _cross_entropy(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(module(batch[0]), batch[1])


def _num_correct(module: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    inputs, labels = batch
    return (module(inputs).argmax(dim=1) == labels).sum(), len(labels)
