"""Handwritten digits of 8 x 8 pixels, from scikit-learn."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import MultiStepLR
from torch.utils.data import TensorDataset

from lightning_pipesync.lab.bench.tasks.task import Task


def digits() -> Task:
    """Returns the task to classify ten digits: 1,197 images to train on, 600 to test on."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, labels, test_size=600, stratify=labels, random_state=0)
    train_images, test_images, train_labels, test_labels = map(torch.from_numpy, parts)
    return Task.classification(
        name="digits",
        build_module=_network,
        train_set=TensorDataset(train_images.float().view(-1, 1, 8, 8), train_labels),
        test_set=TensorDataset(test_images.float().view(-1, 1, 8, 8), test_labels),
        batch_size=16,
        epochs=12,
        target=98.0,
        optimizer=lambda module: SGD(module.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4),
        scheduler=lambda optimizer, steps: MultiStepLR(optimizer, [steps * 6 // 10, steps * 8 // 10]),
    )


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
