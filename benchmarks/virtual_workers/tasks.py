"""Tasks on which small models converge, each with SGD with momentum and with AdamW."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, MultiStepLR
from torch.utils.data import TensorDataset

from benchmarks.tasks import Task, build_task
from benchmarks.tasks.networks import resnet
from benchmarks.virtual_workers.stacked_model import tensors_of
from lightning_pipesync.lab.bench.models import TransformerLM

#: Characters of a window of ``topics``.
_CONTEXT = 32
_WEIGHT_DECAY = 5e-4


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def _cnn() -> nn.Module:
    """Two convolutions and a dense layer, 3,800 values."""
    first, second = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10))


def _mnist1d() -> Task:
    return replace(build_task("mnist1d"), build_module=_mlp, batch_size=8)


def _digits() -> Task:
    return replace(build_task("digits"), build_module=_cnn, batch_size=8)


def _resnet() -> Task:
    """A ResNet-18 of width 4, 44,000 values, with BatchNorm."""
    network = partial(resnet, 18, 10, width=4, channels=1, for_small_images=True)
    return replace(build_task("digits"), build_module=network, batch_size=8)


def _topics() -> Task:
    task = build_task("topics")
    [train], [test] = tensors_of(task.train_set), tensors_of(task.test_set)
    alphabet = int(max(train.max(), test.max())) + 1
    return replace(
        task,
        build_module=lambda: TransformerLM(hidden=32, depth=1, heads=2, vocabulary=alphabet, length=_CONTEXT),
        train_set=TensorDataset(train[:, : _CONTEXT + 1]),
        test_set=TensorDataset(test[:, : _CONTEXT + 1]),
        batch_size=4,
    )


#: What makes each task, without its optimizer.
TASKS: dict[str, Callable[[], Task]] = {"mnist1d": _mnist1d, "digits": _digits, "resnet": _resnet, "topics": _topics}
OPTIMIZERS = ("sgd", "adamw")
_AUGMENTED = ("digits", "resnet")
#: By task and optimizer, and then by the number of workers: what is best for DDP on the validation set.
RATES: dict[tuple[str, str], dict[int, float]] = {
    ("mnist1d", "sgd"): {4: 0.1, 16: 0.2, 64: 0.4},
    ("mnist1d", "adamw"): {4: 0.01, 16: 0.01, 64: 0.02},
    ("digits", "sgd"): {4: 0.05, 16: 0.1, 64: 0.2},
    ("digits", "adamw"): {4: 0.003, 16: 0.01, 64: 0.01},
    ("resnet", "sgd"): {4: 0.05, 16: 0.1, 64: 0.1},
    ("topics", "adamw"): {4: 0.02, 16: 0.03, 64: 0.03},
}


def build(name: str, optimizer: str, lr: float, on_validation: bool = False) -> Task:
    """Returns a task with SGD, momentum and a rate that falls by steps as the papers' do, or AdamW with a cosine."""
    task = TASKS[name]()
    if on_validation:
        task = task.with_validation()
    if name in _AUGMENTED:
        task = _shifted(task)

    def sgd(module: nn.Module) -> Optimizer:
        return SGD(module.parameters(), lr=lr, momentum=0.9, weight_decay=_WEIGHT_DECAY)

    def by_steps(made: Optimizer, steps: int) -> LRScheduler:
        return MultiStepLR(made, [steps * 6 // 10, steps * 8 // 10])

    def adamw(module: nn.Module) -> Optimizer:
        return AdamW(module.parameters(), lr=lr)

    def cosine(made: Optimizer, steps: int) -> LRScheduler:
        return CosineAnnealingLR(made, steps)

    makes: dict[str, Any] = {
        "sgd": {"optimizer": sgd, "scheduler": by_steps},
        "adamw": {"optimizer": adamw, "scheduler": cosine},
    }
    return replace(task, **makes[optimizer])


def _shifted(task: Task) -> Task:
    """Returns a task on images and their eight neighbors, moved by one pixel: augmentation whose epochs are nine."""
    images, labels = tensors_of(task.train_set)
    padded = pad(images, (1, 1, 1, 1))
    height, width = images.shape[2:]
    moved: list[Tensor] = [padded[:, :, y : y + height, x : x + width] for y in range(3) for x in range(3)]
    return replace(
        task, train_set=TensorDataset(torch.cat(moved), labels.repeat(9)), labels=labels.repeat(9), plain_train_set=None
    )
