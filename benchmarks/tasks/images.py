"""The papers' tasks with images: CIFAR-10 and CIFAR-100 in their "python version", and ImageNet-1K as image files."""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset

from benchmarks.tasks.recipes import Recipe
from benchmarks.tasks.task import Layout, Task

#: Mean and standard deviation of the values of a data set's channels, of shape (3, 1, 1).
Statistics = tuple[Tensor, Tensor]


def _statistics(means: list[float], deviations: list[float]) -> Statistics:
    """Returns the statistics of values from 0 to 1."""
    return torch.tensor(means).view(3, 1, 1), torch.tensor(deviations).view(3, 1, 1)


#: SelSync's authors use those of ImageNet for CIFAR-10, too.
_OF_IMAGENET = _statistics([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
_OF_CIFAR100 = _statistics([0.507, 0.487, 0.441], [0.267, 0.256, 0.276])


def _normalized(image: Tensor, of: Statistics) -> Tensor:
    """Returns the input for an image (3, height, width) of bytes."""
    mean, deviation = of
    return (image.float() / 255 - mean) / deviation


def _moved(image: Tensor, by: int) -> Tensor:
    """Returns the image (channels, height, width) moved at random by up to ``by`` pixels, black where it was not."""
    _, height, width = image.shape
    top, left = torch.randint(2 * by + 1, (2,)).tolist()
    return pad(image, (by, by, by, by))[:, top : top + height, left : left + width]


def _mirrored(image: Tensor) -> Tensor:
    """Returns the image (channels, height, width), mirrored with a probability of a half."""
    return image.flip(2) if torch.rand(()) < 0.5 else image


def _task(
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
            image = _mirrored(_moved(image, by=4))
        return _normalized(image, self._statistics), self._labels[index]


class _ArraysOnly(pickle.Unpickler):
    """Reads pickles of plain objects and arrays: a file of someone else's cannot run code."""

    _ALLOWED = frozenset({("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")})

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._ALLOWED:
            return super().find_class(module, name)
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return np.empty(0).__reduce__()[0]
        raise pickle.UnpicklingError(f"it has {module}.{name}, which is no array")


@dataclass(frozen=True)
class Cifar:
    """The files of CIFAR-10 or CIFAR-100, and the task to classify their images of 32 x 32: 50,000 to train on."""

    name: str
    num_classes: int
    train: tuple[str, ...]
    test: str
    label_key: bytes
    statistics: Statistics
    layout: Layout

    def task(self, data: Path, recipe: Recipe) -> Task:
        self.layout.check(data)
        images, labels = self._read([data / part for part in self.train])
        tested = self._read([data / self.test])
        return _task(
            self.name,
            recipe,
            self.num_classes,
            train_set=SmallImages(images, labels, self.statistics, augment=True),
            plain_train_set=SmallImages(images, labels, self.statistics, augment=False),
            test_set=SmallImages(*tested, self.statistics, augment=False),
            labels=labels,
        )

    def _read(self, paths: Sequence[Path]) -> tuple[Tensor, Tensor]:
        """Returns the images (number, 3, 32, 32) of bytes, and the labels (number)."""
        images, labels = [], []
        for path in paths:
            try:
                with path.open("rb") as file:
                    content = _ArraysOnly(file, encoding="bytes").load()
                pixels = torch.from_numpy(content[b"data"]).view(-1, 3, 32, 32)
                numbers = torch.tensor(content[self.label_key])
                if pixels.dtype != torch.uint8 or numbers.shape != pixels.shape[:1]:
                    raise ValueError(f"{pixels.dtype} of shape {tuple(pixels.shape)}, {len(numbers)} labels")
                if not 0 <= int(numbers.min()) <= int(numbers.max()) < self.num_classes:
                    raise ValueError(f"labels from {int(numbers.min())} to {int(numbers.max())}")
            except (pickle.UnpicklingError, EOFError, LookupError, RuntimeError, TypeError, ValueError) as error:
                raise self.layout.wrong(path, f"{type(error).__name__}: {error}") from error
            images.append(pixels)
            labels.append(numbers)
        return torch.cat(images), torch.cat(labels)


_BATCHES = tuple(f"cifar-10-batches-py/data_batch_{number}" for number in range(1, 6))
_TEST_BATCH, _TRAIN_100, _TEST_100 = "cifar-10-batches-py/test_batch", "cifar-100-python/train", "cifar-100-python/test"
CIFAR10 = Cifar(
    "cifar10",
    10,
    _BATCHES,
    _TEST_BATCH,
    b"labels",
    _OF_IMAGENET,
    Layout(
        "CIFAR-10, python version",
        (*_BATCHES, _TEST_BATCH),
        f"{_BATCHES[0]} to data_batch_5 and {_TEST_BATCH}, as cifar-10-python.tar.gz has them",
    ),
)
CIFAR100 = Cifar(
    "cifar100",
    100,
    (_TRAIN_100,),
    _TEST_100,
    b"fine_labels",
    _OF_CIFAR100,
    Layout(
        "CIFAR-100, python version",
        (_TRAIN_100, _TEST_100),
        f"{_TRAIN_100} and {_TEST_100}, as cifar-100-python.tar.gz has them",
    ),
)

#: The edge of an input, and that to which the shorter edge of an image is scaled before it is tested on.
_SIZE, _TESTED = 224, 256
_ENDINGS = (".jpeg", ".jpg", ".png")

IMAGENET_LAYOUT = Layout(
    "ImageNet-1K",
    ("train", "val"),
    "train/CLASS/IMAGE.JPEG and val/CLASS/IMAGE.JPEG, with the same classes (n01440764, ...) in both",
)


def imagenet(data: Path, recipe: Recipe) -> Task:
    """Returns the task to classify the images of a folder; no image is read before it is trained on."""
    IMAGENET_LAYOUT.check(data)
    classes, paths, labels = _images_of(data / "train")
    tested_classes, tested, tested_labels = _images_of(data / "val")
    if other := sorted(set(classes) ^ set(tested_classes)):
        raise ValueError(f"data={str(data)!r} has {other[0]} in one of train and val alone. {IMAGENET_LAYOUT.expected}")
    return _task(
        "imagenet",
        recipe,
        len(classes),
        train_set=ImageFiles(paths, labels, augment=True),
        plain_train_set=ImageFiles(paths, labels, augment=False),
        test_set=ImageFiles(tested, tested_labels, augment=False),
        labels=labels,
    )


class ImageFiles(Dataset[tuple[Tensor, Tensor]]):
    """Image files with labels (number), each read when it is loaded, as an input of 3 x 224 x 224.

    With ``augment`` it is a random part of the image, mirrored at random (Szegedy et al., Going deeper with
    convolutions, Section 6); otherwise the center.
    """

    def __init__(self, paths: list[str], labels: Tensor, augment: bool) -> None:
        self._paths, self._labels, self._augment = paths, labels, augment

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        from PIL import Image, UnidentifiedImageError

        path = self._paths[index]
        try:
            with Image.open(path) as file:
                image = file.convert("RGB")
        except (UnidentifiedImageError, OSError) as error:
            raise IMAGENET_LAYOUT.wrong(Path(path), str(error)) from error
        part = random_part(*image.size) if self._augment else center(*image.size)
        scaled = image.resize((_SIZE, _SIZE), Image.Resampling.BILINEAR, box=part)
        pixels = torch.from_numpy(np.array(scaled)).permute(2, 0, 1)
        return _normalized(_mirrored(pixels) if self._augment else pixels, _OF_IMAGENET), self._labels[index]


#: A part of an image: left, upper, right and lower edge, in pixels.
Box = tuple[float, float, float, float]


def random_part(width: int, height: int) -> Box:
    """Returns a part with 8 to 100 % of an image's area and an aspect ratio of 3/4 to 4/3, which fits into it."""
    for _ in range(10):
        share, shape, left, top = torch.rand(4).tolist()
        area = width * height * (0.08 + 0.92 * share)
        ratio = (3 / 4) * (16 / 9) ** shape
        inner_width, inner_height = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if inner_width <= width and inner_height <= height:
            left, top = left * (width - inner_width), top * (height - inner_height)
            return left, top, left + inner_width, top + inner_height
    return _centered(width, height, min(width, height))


def center(width: int, height: int) -> Box:
    """Returns the part that is 224 x 224 when the shorter edge of the image is 256."""
    return _centered(width, height, min(width, height) * _SIZE / _TESTED)


def _centered(width: int, height: int, edge: float) -> Box:
    left, top = (width - edge) / 2, (height - edge) / 2
    return left, top, left + edge, top + edge


def _images_of(folder: Path) -> tuple[list[str], list[str], Tensor]:
    """Returns the classes, their images' paths, and the labels (number), in a fixed order."""
    classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        images = sorted(entry.path for entry in os.scandir(folder / name) if entry.name.lower().endswith(_ENDINGS))
        if not images:
            raise ValueError(f"{folder / name} has no images. {IMAGENET_LAYOUT.expected}")
        paths += images
        labels += [label] * len(images)
    if not paths:
        raise ValueError(f"{folder} has no folder of a class. {IMAGENET_LAYOUT.expected}")
    return classes, paths, torch.tensor(labels)
