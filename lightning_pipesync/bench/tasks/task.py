"""A model, its data, how it is trained, and what counts as good."""

from __future__ import annotations

from collections.abc import Callable, Sized
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, Subset

#: The part of the training data that is held back for validation.
VALIDATION_SHARE = 0.1


@dataclass(frozen=True)
class Task:
    """Everything about a training but how the ranks communicate.

    Attributes:
        name: under which :func:`build_task` knows it.
        build_module: builds the model; its weights come from torch's global generator.
        train_set: what is trained on; a sampler divides it among the ranks.
        test_set: what quality is measured on.
        batch_size: samples of each rank in a step.
        epochs: in which each rank has gone through its share of ``train_set``.
        loss: computes the loss (0-dim) from a module, or a wrapper of it, and a batch.
        score: of a module on a batch: what all batches' sum is divided by the number of, and that number.
        quality: makes from the mean score what is shown, and compared to the target.
        metric: the name of the quality.
        higher_is_better: whether it is.
        target: the quality to reach, by default.
        optimizer: makes the optimizer of a module.
        scheduler: makes its scheduler, stepped after every step, for so many steps.
        max_norm: to which the gradient is clipped; None: it is not.
        labels: of the samples of ``train_set``; None: they have none.
        labels_per_worker: labels that each rank holds; None: a sampler gives each rank a fair share of all.
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
        """Returns which samples of ``train_set`` are such a share of it, and which the rest: always the same ones."""
        order = torch.randperm(len(cast(Sized, self.train_set)), generator=torch.Generator().manual_seed(0))
        number = round(share * len(order))
        return order[:number], order[number:]

    def with_validation(self) -> Task:
        """Returns the task with a fixed part of its training data in the place of the test set.

        Settings are chosen on it; the model trains on the rest, whatever the seed of the training.
        """
        held_back, kept = (part.sort().values for part in self.divided(VALIDATION_SHARE))
        return replace(
            self,
            train_set=Subset(self.train_set, kept.tolist()),
            test_set=Subset(self.train_set, held_back.tolist()),
            labels=None if self.labels is None else self.labels[kept],
        )

    def with_label_skew(self, labels_per_worker: int) -> Task:
        """Returns the task with data that are not IID: each rank holds only so many labels (SelSync IV-A).

        Raises:
            ValueError: the samples have no labels, or fewer different ones.
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
    """Returns after how many steps of a training the quality is measured so often, the last time at its end."""
    return {round((i + 1) * num_steps / number) for i in range(number)}
