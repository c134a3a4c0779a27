"""A LightningModule, a Trainer and data for tests of the strategies."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import StrategyRegistry
from lightning_utilities.core import rank_zero
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_pipesync  # noqa: F401  # registers the strategies
from tests.support.models import OPTIMIZERS, seeded_mlp

SAMPLES = 64

# Far above any change: after the first step every step stays local, and the replicas differ.
LOCAL = {"delta": 1e9}


def dataset() -> TensorDataset:
    """64 samples, their index, and their class."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 6, generator=generator) * torch.linspace(0.5, 4, SAMPLES).unsqueeze(1)
    return TensorDataset(torch.arange(SAMPLES), x, (x.sum(dim=1) > 0).long())


def batches() -> list[Any]:
    """The same samples, put together as 16 batches."""
    return [dataset()[i : i + 4] for i in range(0, SAMPLES, 4)]


class Classifier(pl.LightningModule):
    """A small network; it records what it trained on and what it validated with."""

    def __init__(self, optimizer: str = "sgd", batch_norm: bool = False, dropout: float = 0.0, scheduler: bool = False):
        super().__init__()
        self.model = nn.Sequential(seeded_mlp(batch_norm=batch_norm), nn.Dropout(dropout), nn.Linear(3, 2))
        self.optimizer_name, self.scheduler = optimizer, scheduler
        self.seen: list[list[int]] = []
        self.validated_with: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        indices, x, y = batch
        self.seen.append(indices.tolist())
        loss = nn.functional.cross_entropy(self.model(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        if batch_idx == 0:
            self.validated_with.append(self.weights())
        _, x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.model(x), y), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.model(batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.optimizer_name](self.model)
        if self.scheduler:
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]
        return optimizer

    def weights(self) -> Tensor:
        """All parameters and floating-point buffers in one vector."""
        tensors = [value.detach().flatten() for value in self.state_dict().values() if value.is_floating_point()]
        return torch.cat(tensors).clone()


@contextmanager
def said() -> Iterator[list[str]]:
    """Collects what Lightning's logger of rank 0 lets through, to which "`Trainer.fit` stopped" goes, too."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    rank_zero.log.addHandler(handler)
    try:
        yield lines
    finally:
        rank_zero.log.removeHandler(handler)


def regression(package: str, raises_at: int | None = None) -> Any:
    """A module of one of the two distributions, which keeps the weights of a validation, and metrics of an epoch."""
    library = import_module(package)

    class Regression(library.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self, width: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layers = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1))
            self.own_metrics: dict[str, float] = {}

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if batch_idx == raises_at:
                raise ArithmeticError("in a step")
            return self.layers(batch[0]).square().mean()

        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.validated = nn.utils.parameters_to_vector(self.parameters()).detach().clone()
            self.log("val_loss", self.layers(batch[0]).square().mean(), sync_dist=True)

        def on_train_epoch_end(self) -> None:
            self.own_metrics = self.trainer.strategy.method.metrics()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    torch.manual_seed(0)
    return Regression()


class Memory(Logger):
    """Keeps what is logged, and at which steps."""

    name, version = "memory", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, metrics))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Keeps none."""


def train_loader(batch_size: int = 4, **kwargs: Any) -> DataLoader:
    return DataLoader(dataset(), batch_size=batch_size, shuffle=True, **kwargs)


def val_loader() -> DataLoader:
    return DataLoader(dataset(), batch_size=16)


def trainer(strategy: Any, devices: int, directory: Path | str, **kwargs: Any) -> pl.Trainer:
    """A quiet Trainer on the CPU; the processes exist already."""
    defaults = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": directory,
        "max_epochs": 2,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(strategy=strategy, devices=devices, **{**defaults, **kwargs})


def launched_trainer(strategy: Any, directory: Path, **kwargs: Any) -> pl.Trainer:
    """A Trainer on the machines and processes that torchrun has started."""
    devices, num_nodes = (int(os.environ[name]) for name in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"))
    return trainer(strategy, devices, directory, num_nodes=num_nodes, **kwargs)


def make_strategy(settings: dict[str, Any] | str) -> Any:
    """A strategy by its settings, of which ``name`` says which, by default SelSync's; or by its name."""
    if isinstance(settings, str):
        return settings
    settings = {"name": "selsync", **settings}
    return StrategyRegistry[settings.pop("name")]["strategy"](**settings)


def fit(
    directory: Path,
    strategy: dict[str, Any] | str,
    module: dict[str, Any] | None = None,
    loader: dict[str, Any] | None = None,
    *,
    make: type[Classifier] = Classifier,
    resume: Path | None = None,
    saved: str | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Fits a Classifier in this rank and returns what it did.

    Args:
        directory: where the Trainer writes to.
        strategy: by its settings, or its name.
        module: arguments of the Classifier.
        loader: arguments of the training loader.
        make: a derived class.
        resume: a checkpoint.
        saved: name of the checkpoint after the training.
        kwargs: arguments of the Trainer.
    """
    model = make(**(module or {}))
    run = trainer(make_strategy(strategy), int(os.environ["WORLD_SIZE"]), directory, **kwargs)
    with mock.patch.dict(os.environ):  # a Trainer removes what a launcher has set
        run.fit(model, train_loader(**(loader or {})), val_loader(), ckpt_path=resume)
    if saved is not None:
        run.save_checkpoint(directory / saved)
    scaler = getattr(run.precision_plugin, "scaler", None)
    return {
        "weights": model.weights(),
        "parameters": nn.utils.parameters_to_vector(model.parameters()).detach().clone(),
        "validated_with": model.validated_with,
        "seen": model.seen,
        "metrics": {name: float(value) for name, value in run.callback_metrics.items()},
        "shown": sorted(run.progress_bar_metrics),
        "steps": run.global_step,
        "scale": None if scaler is None else scaler.get_scale(),
    }


def scaling(scale: float = 2.0**16, growth_interval: int = 2000) -> MixedPrecision:
    """16-mixed precision with its loss scaler on the CPU, where the Trainer would quietly take bf16-mixed."""
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", scale, growth_interval=growth_interval))
