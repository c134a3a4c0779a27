"""CIFAR-10 and CIFAR-100, from the files of their "python version"."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.tasks.images import (
    CIFAR100,
    IMAGENET,
    Statistics,
    image_task,
    mirrored,
    moved,
    normalized,
)
from benchmarks.tasks.layout import Layout
from benchmarks.tasks.recipes import Recipe
from benchmarks.tasks.task import Task

_FOLDER_10, _FOLDER_100 = "cifar-10-batches-py", "cifar-100-python"
_TRAIN_10 = [f"{_FOLDER_10}/data_batch_{number}" for number in range(1, 6)]
_TEST_10 = f"{_FOLDER_10}/test_batch"
_TRAIN_100, _TEST_100 = f"{_FOLDER_100}/train", f"{_FOLDER_100}/test"
_SIZE = 32

CIFAR10_LAYOUT = Layout(
    "CIFAR-10, python version",
    (*_TRAIN_10, _TEST_10),
    f"{_FOLDER_10}/data_batch_1 to data_batch_5 and {_FOLDER_10}/test_batch, as cifar-10-python.tar.gz has them",
)
CIFAR100_LAYOUT = Layout(
    "CIFAR-100, python version",
    (_TRAIN_100, _TEST_100),
    f"{_FOLDER_100}/train and {_FOLDER_100}/test, as cifar-100-python.tar.gz has them",
)


def cifar10(data: Path, recipe: Recipe) -> Task:
    """Returns the task to classify images of 32 x 32 in 10 classes: 50,000 to train on, 10,000 to test on."""
    return _task("cifar10", data, recipe, 10, CIFAR10_LAYOUT, _TRAIN_10, [_TEST_10], b"labels", IMAGENET)


def cifar100(data: Path, recipe: Recipe) -> Task:
    """Returns the task to classify images of 32 x 32 in 100 classes: 50,000 to train on, 10,000 to test on."""
    return _task("cifar100", data, recipe, 100, CIFAR100_LAYOUT, [_TRAIN_100], [_TEST_100], b"fine_labels", CIFAR100)


class SmallImages(Dataset[tuple[Tensor, Tensor]]):
    """Images (number, 3, height, width) of bytes with labels (number), each normalized when it is loaded.

    With ``augment`` an image is moved by up to 4 pixels and mirrored at random, as in the ResNets for CIFAR-10.
    """

    def __init__(self, images: Tensor, labels: Tensor, of: Statistics, augment: bool) -> None:
        self._images, self._labels, self._statistics, self._augment = images, labels, of, augment

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self._images[index]
        if self._augment:
            image = mirrored(moved(image, by=4))
        return normalized(image, self._statistics), self._labels[index]


def _task(
    name: str,
    data: Path,
    recipe: Recipe,
    num_classes: int,
    layout: Layout,
    train: Sequence[str],
    test: Sequence[str],
    label_key: bytes,
    of: Statistics,
) -> Task:
    layout.check(data)
    images, labels = _read([data / part for part in train], label_key, num_classes, layout)
    tested = _read([data / part for part in test], label_key, num_classes, layout)
    return image_task(
        name,
        recipe,
        num_classes,
        train_set=SmallImages(images, labels, of, augment=True),
        plain_train_set=SmallImages(images, labels, of, augment=False),
        test_set=SmallImages(*tested, of, augment=False),
        labels=labels,
    )


def _read(paths: Sequence[Path], label_key: bytes, num_classes: int, layout: Layout) -> tuple[Tensor, Tensor]:
    """Returns the images (number, 3, 32, 32) of bytes, and the labels (number)."""
    images, labels = [], []
    for path in paths:
        try:
            with path.open("rb") as file:
                content = _ArraysOnly(file, encoding="bytes").load()
            pixels = torch.from_numpy(content[b"data"]).view(-1, 3, _SIZE, _SIZE)
            numbers = torch.tensor(content[label_key])
            if pixels.dtype != torch.uint8 or numbers.shape != pixels.shape[:1]:
                raise ValueError(f"{pixels.dtype} of shape {tuple(pixels.shape)}, {len(numbers)} labels")
            if not 0 <= int(numbers.min()) <= int(numbers.max()) < num_classes:
                raise ValueError(f"labels from {int(numbers.min())} to {int(numbers.max())}")
        except (pickle.UnpicklingError, EOFError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise layout.wrong(path, f"{type(error).__name__}: {error}") from error
        images.append(pixels)
        labels.append(numbers)
    return torch.cat(images), torch.cat(labels)


class _ArraysOnly(pickle.Unpickler):
    """Reads pickles of plain objects and arrays: a file of someone else's cannot run code."""

    _ALLOWED = frozenset({("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")})

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._ALLOWED:
            return super().find_class(module, name)
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return np.empty(0).__reduce__()[0]
        raise pickle.UnpicklingError(f"it has {module}.{name}, which is no array")
