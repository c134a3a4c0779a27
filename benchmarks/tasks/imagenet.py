"""ImageNet-1K, from a folder of images for each class."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.tasks.images import IMAGENET, image_task, mirrored, normalized
from benchmarks.tasks.layout import Layout
from benchmarks.tasks.recipes import Recipe
from benchmarks.tasks.task import Task

if TYPE_CHECKING:
    from PIL.Image import Image

#: The edge of an input, and that to which the shorter edge of an image is scaled before it is tested on.
_SIZE, _TESTED = 224, 256
_ENDINGS = (".jpeg", ".jpg", ".png")

LAYOUT = Layout(
    "ImageNet-1K",
    ("train", "val"),
    "train/CLASS/IMAGE.JPEG and val/CLASS/IMAGE.JPEG, with the same classes (n01440764, ...) in both",
)


def imagenet(data: Path, recipe: Recipe) -> Task:
    """Returns the task to classify the images of a folder; no image is read before it is trained on."""
    LAYOUT.check(data)
    classes, paths, labels = _images_of(data / "train")
    tested_classes, tested, tested_labels = _images_of(data / "val")
    if other := sorted(set(classes) ^ set(tested_classes)):
        raise ValueError(f"data={str(data)!r} has {other[0]} in one of train and val alone. {LAYOUT.expected}")
    return image_task(
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
            raise LAYOUT.wrong(Path(path), str(error)) from error
        if self._augment:
            return normalized(mirrored(_bytes(_scaled(image, random_part(*image.size)))), IMAGENET), self._labels[index]
        return normalized(_bytes(_scaled(image, center(*image.size))), IMAGENET), self._labels[index]


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


def _scaled(image: Image, box: Box) -> Image:
    from PIL.Image import Resampling

    return image.resize((_SIZE, _SIZE), Resampling.BILINEAR, box=box)


def _bytes(image: Image) -> Tensor:
    """Returns the image (3, height, width) of bytes."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def _images_of(folder: Path) -> tuple[list[str], list[str], Tensor]:
    """Returns the classes, their images' paths, and the labels (number), in a fixed order."""
    classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        images = sorted(entry.path for entry in os.scandir(folder / name) if entry.name.lower().endswith(_ENDINGS))
        if not images:
            raise ValueError(f"{folder / name} has no images. {LAYOUT.expected}")
        paths += images
        labels += [label] * len(images)
    if not paths:
        raise ValueError(f"{folder} has no folder of a class. {LAYOUT.expected}")
    return classes, paths, torch.tensor(labels)
