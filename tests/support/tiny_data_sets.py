"""Data sets of a few samples in the formats of the papers' ones, for the tasks that read a folder."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np

#: Classes of ImageNet.
CLASSES = ("n01440764", "n01443537", "n01484850")
#: A line of WikiText, in its tokens.
LINE = (
    " = Valkyria Chronicles III = \n \n Senjō no Valkyria 3 : <unk> Chronicles ( Japanese : 3 , lit . ) is a game .\n"
)


def write_cifar10(folder: Path, num_images: int = 4) -> None:
    """Writes the six files, of so many images each, with the labels 0, 1, ..."""
    names = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]
    for number, name in enumerate(names):
        _write_batch(folder / "cifar-10-batches-py" / name, number, num_images, {b"labels": [*range(num_images)]})


def write_cifar100(folder: Path, num_images: int = 16) -> None:
    """Writes the two files, of so many images each, with the labels 90, 91, ..., which are also those of two."""
    labels = [90 + i % 8 for i in range(num_images)]
    for number, name in enumerate(("train", "test")):
        coarse = {b"fine_labels": labels, b"coarse_labels": [0] * num_images}
        _write_batch(folder / "cifar-100-python" / name, number, num_images, coarse)


def _write_batch(path: Path, seed: int, num_images: int, labels: dict[bytes, list[int]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = np.random.default_rng(seed).integers(0, 256, (num_images, 3072), dtype=np.uint8)
    path.write_bytes(pickle.dumps({b"batch_label": b"a batch", b"data": data, **labels}, protocol=2))


def write_imagenet(folder: Path, num_images: int = 2) -> None:
    """Writes JPEGs of three classes, one in grey, of 60 x 40 pixels."""
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    for part, name in ((part, name) for part in ("train", "val") for name in CLASSES):
        (folder / part / name).mkdir(parents=True)
        for number in range(num_images):
            image = Image.fromarray(pixels).convert("L" if number else "RGB")
            image.save(folder / part / name / f"{name}_{number}.JPEG")


def write_wikitext(folder: Path, num_lines: int = 12) -> None:
    """Writes the text to train on, of so many times the same lines, and the one to test on, with a word of its own."""
    folder.mkdir(exist_ok=True)
    (folder / "wiki.train.tokens").write_text(LINE * num_lines, encoding="utf-8")
    (folder / "wiki.test.tokens").write_text(LINE.replace("game", "novelty") * 2, encoding="utf-8")


#: By task, what writes its data set to a folder.
WRITERS = {
    "cifar10": write_cifar10,
    "cifar100": write_cifar100,
    "imagenet": write_imagenet,
    "wikitext": write_wikitext,
}
