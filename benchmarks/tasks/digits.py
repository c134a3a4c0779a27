"""Handwritten digits of 8 x 8 pixels, from scikit-learn."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import MultiStepLR
from torch.utils.data import TensorDataset

from benchmarks.tasks.classifiers import resnet
from benchmarks.tasks.task import Task


def digits() -> Task:
    """Returns the task to classify ten digits: 1,197 images to train on, 600 to test on."""
    return Task.classification(
        **_data(),
        name="digits",
        build_module=_network,
        batch_size=16,
        epochs=12,
        target=98.0,
        optimizer=lambda module: SGD(module.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4),
        scheduler=lambda optimizer, steps: MultiStepLR(optimizer, [steps * 6 // 10, steps * 8 // 10]),
    )


def resnet_digits() -> Task:
    """Returns the task with a narrow ResNet-18, trained as SelSync's ResNet-101 (Section IV-A), in fewer epochs."""
    return Task.classification(
        **_data(),
        name="resnet_digits",
        build_module=lambda: resnet(18, num_classes=10, width=16, channels=1, for_small_images=True),
        batch_size=16,
        epochs=24,
        target=98.0,
        optimizer=lambda module: SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=4e-4),
        # After the same parts of the training: 110 and 150 of 233 epochs.
        scheduler=lambda optimizer, steps: MultiStepLR(optimizer, [steps * 110 // 233, steps * 150 // 233]),
    )


def _data() -> dict[str, Any]:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, labels, test_size=600, stratify=labels, random_state=0)
    train_images, test_images, train_labels, test_labels = map(torch.from_numpy, parts)
    return {
        "train_set": TensorDataset(train_images.float().view(-1, 1, 8, 8), train_labels),
        "test_set": TensorDataset(test_images.float().view(-1, 1, 8, 8), test_labels),
        "labels": train_labels,
    }


def _network() -> nn.Module:
    """Two convolutions and two dense layers, 550,000 values."""
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(64 * 4 * 4, 512),
        nn.ReLU(),
        nn.Dropout(0.25),
        nn.Linear(512, 10),
    )
