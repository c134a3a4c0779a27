"""What a Trainer may do with a strategy before and between trainings, as with DDP's."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import lightning.pytorch
import pytorch_lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.harness import launch

NAMES = ("dear", "ea_pipe", "pipe_sgd", "selsync")


def build(package: ModuleType, name: str, directory: Path, world_size: int, *callbacks: Any) -> tuple[Any, Any]:
    """A module and a Trainer of one of the two distributions."""

    class Regression(package.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            return self.layers(batch[0]).square().mean()

        def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
            self.log("val_loss", self.layers(batch[0]).square().mean())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    torch.manual_seed(0)
    trainer = package.Trainer(
        strategy=name, devices=world_size, accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=directory, callbacks=list(callbacks),
    )  # fmt: skip
    return Regression(), trainer


def loader() -> DataLoader:
    return DataLoader(TensorDataset(torch.randn(16, 4, generator=torch.Generator().manual_seed(0))), batch_size=2)


def own_callbacks(package: ModuleType, trainer: Any) -> list[int]:
    """Where in the Trainer's list the strategy's callback is."""
    names = [type(callback).__name__ for callback in trainer.callbacks]
    assert all(isinstance(callback, package.Callback) for callback in trainer.callbacks)
    return [index for index, name in enumerate(names) if name in ("PipeSyncCallback", "PipelineCallback")]


def connect_without_a_trainer(package: ModuleType, name: str, directory: Path) -> dict[str, Any]:
    """Goes through what the Trainer does step by step, the module's Trainer last, then validates and fits."""
    other = package.Callback()
    model, trainer = build(package, name, directory, 1, other)
    found: dict[str, Any] = {}
    type(trainer.strategy)().connect(model)  # a strategy of no Trainer, a module of none
    trainer.strategy.connect(model)
    found["connected"] = trainer.strategy.lightning_module is model and trainer.lightning_module is model
    path = directory / f"{package.__name__}-{name}.ckpt"
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)["state_dict"]
    found["saved"] = all(torch.equal(saved[key], value) for key, value in model.state_dict().items())

    for stage in ("validate", "fit"):
        trainer.state.fn = stage
        trainer.strategy.connect(model)
        model.trainer = trainer
        trainer.strategy.setup_environment()
        trainer.strategy.setup(trainer)
        found[f"set up to {stage}"] = trainer.strategy.method is not None
        trainer.strategy.teardown()
    found["to set up"] = own_callbacks(package, trainer)

    model, trainer = build(package, name, directory, 1, other)
    trainer.strategy.connect(model)
    trainer.validate(model, loader(), verbose=False)
    trainer.fit(model, loader(), loader())
    trainer.fit_loop.max_epochs = 2
    trainer.callbacks.insert(0, package.Callback())  # as a Trainer itself puts those that tune first
    trainer.fit(model, loader())
    found["after fitting"] = own_callbacks(package, trainer)
    found["steps"] = trainer.global_step
    return found


def connect_all(directory: Path) -> dict[str, dict[str, Any]]:
    return {
        f"{package.__name__}, {name}": connect_without_a_trainer(package, name, directory)
        for package in (lightning.pytorch, pytorch_lightning)
        for name in NAMES
    }


def test_connecting_before_the_module_has_a_trainer(tmp_path: Path) -> None:
    [outcomes] = launch(connect_all, 1, tmp_path, init=False)
    for case, found in outcomes.items():
        expected = {
            "connected": True, "saved": True, "set up to validate": "ea_pipe" in case, "set up to fit": True,
            "to set up": [0], "after fitting": [0], "steps": 16,
        }  # fmt: skip
        assert found == expected, case


def count_saves(directory: Path) -> dict[str, int]:
    """How often each strategy calls ``torch.save`` for one checkpoint in the midst of a training."""
    counts: dict[str, int] = {}
    for name in NAMES:

        class Saving(lightning.pytorch.Callback):
            def on_train_batch_end(self, trainer: Any, *args: Any, path: Path = directory / f"{name}.ckpt") -> None:
                if trainer.global_step == 3:
                    with mock.patch("torch.save", wraps=torch.save) as save:
                        trainer.save_checkpoint(path)
                    counts[path.stem] = save.call_count

        model, trainer = build(lightning.pytorch, name, directory, 2, Saving())
        trainer.fit(model, loader())
    return counts


def test_a_checkpoint_is_saved_once_by_one_rank(tmp_path: Path) -> None:
    """States that travel to it are not: a script that counts or redirects `torch.save` means what is written."""
    writing, other = launch(count_saves, 2, tmp_path, init=False)
    assert writing == dict.fromkeys(NAMES, 1)
    assert other == dict.fromkeys(NAMES, 0)
    for name in NAMES:
        ranks = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["pipesync"]["ranks"]
        assert sorted(ranks) == [0, 1]
