"""What the tasks with images of the papers have in common: how images become inputs, and the task."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset

from benchmarks.tasks.recipes import Recipe
from benchmarks.tasks.task import Task

#: Mean and standard deviation of the values of a data set's channels, of shape (3, 1, 1).
Statistics = tuple[Tensor, Tensor]


def statistics(means: list[float], deviations: list[float]) -> Statistics:
    """Returns the statistics of values from 0 to 1."""
    return torch.tensor(means).view(3, 1, 1), torch.tensor(deviations).view(3, 1, 1)


#: Of ImageNet. SelSync's authors use them for CIFAR-10, too.
IMAGENET = statistics([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
CIFAR100 = statistics([0.507, 0.487, 0.441], [0.267, 0.256, 0.276])


def normalized(image: Tensor, of: Statistics) -> Tensor:
    """Returns the input for an image (3, height, width) of bytes."""
    mean, deviation = of
    return (image.float() / 255 - mean) / deviation


def moved(image: Tensor, by: int) -> Tensor:
    """Returns the image (channels, height, width) moved at random by up to ``by`` pixels, black where it was not."""
    _, height, width = image.shape
    top, left = torch.randint(2 * by + 1, (2,)).tolist()
    return pad(image, (by, by, by, by))[:, top : top + height, left : left + width]


def mirrored(image: Tensor) -> Tensor:
    """Returns the image (channels, height, width), mirrored with a probability of a half."""
    return image.flip(2) if torch.rand(()) < 0.5 else image


def image_task(
    name: str,
    recipe: Recipe,
    num_classes: int,
    train_set: Dataset[Any],
    plain_train_set: Dataset[Any],
    test_set: Dataset[Any],
    labels: Tensor,
) -> Task:
    """Returns the task of a recipe on a data set; ``train_set`` is augmented, ``plain_train_set`` is not."""
    return Task.classification(
        name=name,
        build_module=lambda: recipe.build(num_classes),
        train_set=train_set,
        plain_train_set=plain_train_set,
        test_set=test_set,
        labels=labels,
        top=recipe.top,
        **recipe.settings,
    )
