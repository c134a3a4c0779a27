"""scikit-learn's handwritten digits, which need no download."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor


def split_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns 1,197 images to train on and 600 to test with, shape ``[count, 64]`` from 0 to 1, then their digits.

    Each digit is equally frequent in both.
    """
    pixels, digits = load_digits(return_X_y=True)
    split = train_test_split(pixels / 16, digits, test_size=600, stratify=digits, random_state=0)
    train_images, test_images, train_digits, test_digits = map(torch.from_numpy, split)
    return train_images.float(), test_images.float(), train_digits, test_digits
