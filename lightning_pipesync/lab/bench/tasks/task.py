"""A task: a model, its data, its optimizer and its target quality."""

from __future__ import annotations

from collections.abc import Callable, Sized
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, Subset

#: The part of the training data that is held out for validation.
VALIDATION_SHARE = 0.1


@dataclass(frozen=True)
class Task:
    """A training without the communication of its ranks.

    Attributes:
        name: the name for :func:`build_task`.
        build_module: builds the model; its weights come from torch's global generator.
        train_set: the training set, which a sampler divides among the ranks.
        test_set: the set that the quality is measured on.
        batch_size: samples of each rank in a step.
        epochs: the number of passes of a rank over its share of ``train_set``.
        loss: computes the loss (0-dim) from a module, or a wrapper of it, and a batch.
        score: returns the sum of the scores of a module on a batch, and their number.
        quality: computes the quality, which is compared with the target, from the mean score.
        metric: the name of the quality.
        higher_is_better: whether a higher quality is better.
        target: the default of the quality to reach.
        optimizer: returns the optimizer of a module.
        scheduler: returns the scheduler of an optimizer for a number of steps, stepped after every step.
        max_norm: the norm to which the gradient is clipped; None: no clipping.
        labels: the labels of the samples of ``train_set``; None: there are none.
        labels_per_worker: the number of labels that each rank holds; None: a sampler gives each rank an equal share.
    """

    name: str
    build_module: Callable[[], nn.Module]
    train_set: Dataset[Any]
    test_set: Dataset[Any]
    batch_size: int
    epochs: int
    loss: Callable[[nn.Module, Any], Tensor]
    score: Callable[[nn.Module, Any], tuple[Tensor, int]]
    quality: Callable[[float], float]
    metric: str
    higher_is_better: bool
    target: float
    optimizer: Callable[[nn.Module], Optimizer]
    scheduler: Callable[[Optimizer, int], LRScheduler]
    max_norm: float | None = None
    labels: Tensor | None = None
    labels_per_worker: int | None = None

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
        """Returns the task with non-IID data: each rank holds ``labels_per_worker`` labels (SelSync IV-A).

        Raises:
            ValueError: the samples have no labels, or fewer distinct ones.
        """
        if self.labels is None:
            raise ValueError(f"labels_per_worker={labels_per_worker}: the samples of {self.name!r} have no labels.")
        num_labels = len(self.labels.unique())
        if not 1 <= labels_per_worker <= num_labels:
            raise ValueError(
                f"labels_per_worker={labels_per_worker} must be from 1 to {num_labels}, the labels there are."
            )
        return replace(self, labels_per_worker=labels_per_worker)


def evaluations(num_steps: int, number: int) -> set[int]:
    """Returns the ``number`` steps after which the quality is measured; the last one is the end of the training."""
    return {round((i + 1) * num_steps / number) for i in range(number)}
