"""What stands for the reader's own in the snippets of the docs: a model, data, loaders; and fewer hosts."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import lightning.fabric
import lightning.pytorch
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ConstantLR
from torch.utils.data import DataLoader, TensorDataset

NUM_CLASSES = 10


class Net(lightning.pytorch.LightningModule):
    """A classifier, for plain loops and for a Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, NUM_CLASSES)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=0.1)


def with_defaults(kind: Callable[..., Any], **replaced: Any) -> Callable[..., Any]:
    """Returns what calls ``kind`` as a snippet does, but on the ranks of the test and on their processors."""

    def make(**arguments: Any) -> Any:
        here = {"accelerator": "cpu", "devices": int(os.environ["WORLD_SIZE"]), "num_nodes": 1}
        return kind(**{**arguments, **here, **replaced})

    return make


def frameworks() -> Any:
    """Within this context Trainers and Fabric are those of the test, and Accelerate has no accelerator."""
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    trainer = with_defaults(lightning.pytorch.Trainer, max_steps=2, **quiet)
    fabric = with_defaults(lightning.fabric.Fabric)
    patches = mock.patch.multiple("lightning.pytorch", Trainer=trainer), mock.patch("lightning.fabric.Fabric", fabric)
    return (*patches, mock.patch.dict(os.environ, ACCELERATE_USE_CPU="true"))


def stand_ins(folder: str) -> dict[str, Any]:
    """Returns new objects for a snippet, by the names that it uses without defining them; the same on all ranks."""
    torch.manual_seed(0)
    x = torch.randn(48, 6)
    labels = torch.arange(48) % NUM_CLASSES
    dataset, model = TensorDataset(x, labels), Net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    loaders = {
        name: DataLoader(dataset, batch_size=4) for name in ("loader", "train_loader", "val_loader", "test_loader")
    }

    def validate(model: nn.Module, loader: DataLoader[Any] = loaders["val_loader"]) -> float:
        with torch.no_grad():
            return sum(float(cross_entropy(model(x), y)) for x, y in loader)

    return {
        **{"Net": Net, "model": model, "layers": model.layers, "optimizer": optimizer, "folder": folder},
        **{"make_optimizer": partial(SGD, lr=0.1), "scheduler": ConstantLR(optimizer, 1.0)},
        **{"dataset": dataset, "labels": labels, "loss_function": cross_entropy, "validate": validate},
        **{"epoch": 0, "epochs": 2, "total_steps": 8, "num_batches": 1},
        **loaders,
    }
