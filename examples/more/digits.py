"""Trains a small convolutional network on handwritten digits, with DDP and with the methods of this package.

    python examples/more/digits.py                                    two processes on this machine
    torchrun --nproc-per-node 2 examples/more/digits.py               the same
    torchrun --nnodes 2 --nproc-per-node 2 \\
        --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        examples/more/digits.py                                       on each of two machines
    python examples/more/slow_network.py examples/more/digits.py      two hosts, emulated on this machine

The 1,797 images come with scikit-learn. All trainings have the same network, optimizer and number of steps; only the
Trainer's strategy differs. At the end, rank 0 prints a table and writes a picture and all measurements (results.json).
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import lightning as L
import torch
from helpers.digit_images import split_digits
from helpers.launching import parse_launch_options, trainer_options
from helpers.recording import Recorder, Run
from helpers.report import draw_picture, print_table, write_json
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_pipesync import DeARStrategy  # which registers the names of all strategies

#: Strategies with settings, by their names in the table. All others are known to the Trainer by name.
WITH_SETTINGS = {"dear, 4 bits": partial(DeARStrategy, compression="int4")}


class DigitClassifier(L.LightningModule):
    """Two convolutions and two dense layers for images of 8 x 8 pixels.

    Args:
        learning_rate: initial learning rate; divided by 10 after 60% and after 80% of the epochs.
    """

    def __init__(self, learning_rate: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.network = nn.Sequential(
            nn.Conv2d(1, 64, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(64, 128, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.25),
            nn.Linear(128 * 4 * 4, 256),
            nn.ReLU(),
            nn.Dropout(0.25),
            nn.Linear(256, 10),
        )
        self.test_accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.network(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.test_accuracy(self.network(images), labels)
        self.log("test_accuracy", self.test_accuracy)

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[torch.optim.lr_scheduler.LRScheduler]]:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.learning_rate, momentum=0.9, weight_decay=5e-4)
        epochs = self.trainer.max_epochs
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [epochs * 6 // 10, epochs * 8 // 10])
        return [optimizer], [scheduler]


class Digits(L.LightningDataModule):
    """scikit-learn's handwritten digits: 1,197 to train on, 600 to test with, each digit equally frequent in both.

    Args:
        batch_size: images per process and step.
        drop_last: whether to drop a smaller last batch of an epoch.
    """

    def __init__(self, batch_size: int, drop_last: bool = False) -> None:
        super().__init__()
        self.batch_size, self.drop_last = batch_size, drop_last

    def setup(self, stage: str) -> None:
        images, test_images, digits, test_digits = split_digits()
        self.train_set = TensorDataset(images.view(-1, 1, 8, 8), digits)
        self.test_set = TensorDataset(test_images.view(-1, 1, 8, 8), test_digits)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True, drop_last=self.drop_last)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.test_set, batch_size=100)


def train(run: Run, options: argparse.Namespace) -> L.Trainer:
    """Trains once, on all processes together."""
    L.seed_everything(run.seed, verbose=False)  # every strategy starts with the same weights
    trainer = L.Trainer(
        strategy=WITH_SETTINGS[run.strategy]() if run.strategy in WITH_SETTINGS else run.strategy,
        max_epochs=options.epochs,
        callbacks=[Recorder(run)],
        enable_progress_bar=False,  # the recorder shows the progress
        **trainer_options(options),
    )
    trainer.fit(DigitClassifier(options.learning_rate), datamodule=Digits(options.batch_size))
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--strategies",
        nargs="+",
        default=["ddp", "dear", *WITH_SETTINGS, "selsync", "local_sgd"],
        help="of the Trainer (default: %(default)s)",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="train once for each of these (default: 0)")
    parser.add_argument("--epochs", type=int, default=12, help="of every training (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="initial (default: %(default)s)")
    parser.add_argument("--network", default="", help="its name, for the picture")
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/digits"), help="folder for the results (default: %(default)s)"
    )
    options = parse_launch_options(parser)

    # Seed by seed, so that a busy moment of the machine affects all strategies.
    runs = [Run(strategy, seed) for seed in options.seeds for strategy in options.strategies]
    for run in runs:
        trainer = train(run, options)

    if trainer.is_global_zero:
        options.output.mkdir(parents=True, exist_ok=True)
        title = f"{trainer.world_size} ranks{options.network and ', ' + options.network}"
        draw_picture(runs, title, options.output / "digits.png")
        write_json(runs, title, options, options.output / "results.json")
        print_table(runs, title)
        print(f"Picture and all measurements: {options.output}")


if __name__ == "__main__":
    main()
