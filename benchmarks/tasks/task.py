"""A task: a model, its data, its optimizer and its target quality."""

from __future__ import annotations

import math
from collections.abc import Callable, Sized
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, Subset

from lightning_pipesync.core.torch_private import map_tensors

#: The devices on which a task is trained.
DEVICES = ("cpu", "cuda")
#: A perplexity above it, or none at all, counts as this one: tables and pictures need numbers.
WORST_PERPLEXITY = 1e6
#: The part of the training data that is held out for validation.
VALIDATION_SHARE = 0.1


@dataclass(frozen=True)
class Task:
    """A training without the communication of its ranks."""

    #: The name in ``TASKS`` or ``READ_TASKS``.
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
    #: The samples of ``train_set`` as those of a test set are, without augmentation; None: they have none.
    plain_train_set: Dataset[Any] | None = None
    #: Samples that each rank tests at once.
    test_batch_size: int = 100
    #: The number of processes that load the samples of each rank; 0: the rank itself does.
    workers: int = 0
    #: The type of the device on which each rank trains.
    device: str = "cpu"

    def build_module_there(self) -> nn.Module:
        """Returns a new model on the device."""
        return self.build_module().to(self.device)

    def batch_there(self, batch: Any) -> Any:
        """Returns a batch on the device."""
        return batch if self.device == "cpu" else map_tensors(lambda tensor: tensor.to(self.device), batch)

    @classmethod
    def classification(cls, *, labels: Tensor, top: int = 1, **rest: Any) -> Task:
        """Returns a task whose quality is the accuracy in %, on inputs and labels, which ``train_set`` has, too.

        An output is right if the label is among the ``top`` largest.
        """
        metric = "accuracy %" if top == 1 else f"top-{top} accuracy %"
        shown: dict[str, Any] = {"quality": lambda share: 100 * share, "metric": metric, "higher_is_better": True}
        return cls(labels=labels, loss=_cross_entropy, score=partial(_num_correct, top=top), **shown, **rest)

    @classmethod
    def language_model(cls, *, unit: str, **rest: Any) -> Task:
        """Returns a task whose quality is the perplexity per ``unit``, on windows of numbers with the next."""
        shown: dict[str, Any] = {"quality": perplexity, "metric": f"perplexity per {unit}", "higher_is_better": False}
        return cls(loss=_mean_of_window, score=_sum_of_window, **shown, **rest)

    @property
    def samples_to_test_on(self) -> Dataset[Any]:
        """The samples of ``train_set`` without augmentation."""
        return self.train_set if self.plain_train_set is None else self.plain_train_set

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
            test_set=Subset(self.samples_to_test_on, held_back.tolist()),
            plain_train_set=None if self.plain_train_set is None else Subset(self.plain_train_set, kept.tolist()),
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


def perplexity(mean: float) -> float:
    """Returns the perplexity of a mean negative log-likelihood; of a training that has diverged the largest one."""
    return math.exp(mean) if mean < math.log(WORST_PERPLEXITY) else WORST_PERPLEXITY  # also if it is not a number


def _cross_entropy(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(module(batch[0]), batch[1])


def _num_correct(module: nn.Module, batch: tuple[Tensor, Tensor], top: int) -> tuple[Tensor, int]:
    inputs, labels = batch
    outputs = module(inputs)
    largest = outputs.topk(min(top, outputs.shape[1]), dim=1).indices
    return (largest == labels.unsqueeze(1)).sum(), len(labels)


def _mean_of_window(module: nn.Module, batch: tuple[Tensor]) -> Tensor:
    total, number = _sum_of_window(module, batch)
    return total / number


def _sum_of_window(module: nn.Module, batch: tuple[Tensor]) -> tuple[Tensor, int]:
    """Returns the negative log-likelihood of all but the first of each window, summed, and their number."""
    [numbers] = batch
    answers = numbers[:, 1:]
    return cross_entropy(module(numbers[:, :-1]).flatten(0, 1), answers.flatten(), reduction="sum"), answers.numel()
