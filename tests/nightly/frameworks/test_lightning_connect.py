"""Both distributions of the Trainer: what it may do with a strategy before and between trainings, as with DDP's."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.case_table import Outcomes, launch_cases

#: A distribution, and a method.
CASES = [
    (package, name)
    for package in ("lightning.pytorch", "pytorch_lightning")
    for name in ("dear", "ea_pipe", "local_sgd", "parameter_server", "pipe_sgd", "selsync")
]


def build(package: str, name: str, directory: Path, world_size: int, *callbacks: Any) -> tuple[Any, Any]:
    """A module and a Trainer of one of the two distributions."""
    library = import_module(package)

    class Regression(library.LightningModule):  # type: ignore[name-defined, misc]
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
    trainer = library.Trainer(
        strategy=name, devices=world_size, accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=directory, callbacks=list(callbacks),
    )  # fmt: skip
    return Regression(), trainer


def loader() -> DataLoader:
    return DataLoader(TensorDataset(torch.randn(16, 4, generator=torch.Generator().manual_seed(0))), batch_size=2)


def own_callbacks(package: str, trainer: Any) -> list[int]:
    """Where in the Trainer's list the strategy's callback is."""
    names = [type(callback).__name__ for callback in trainer.callbacks]
    assert all(isinstance(callback, import_module(package).Callback) for callback in trainer.callbacks)
    return [index for index, name in enumerate(names) if name in ("PipeSyncCallback", "PipelineCallback")]


def connect_without_a_trainer(package: str, name: str, directory: Path) -> dict[str, Any]:
    """Goes through what the Trainer does step by step, the module's Trainer last, then validates and fits."""
    other = import_module(package).Callback()
    model, trainer = build(package, name, directory, 1, other)
    found: dict[str, Any] = {}
    type(trainer.strategy)().connect(model)  # a strategy of no Trainer, a module of none
    trainer.strategy.connect(model)
    found["connected"] = trainer.strategy.lightning_module is model and trainer.lightning_module is model
    path = directory / f"{package}-{name}.ckpt"
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
    trainer.callbacks.insert(0, import_module(package).Callback())  # as a Trainer itself puts those that tune first
    trainer.fit(model, loader())
    found["after fitting"] = own_callbacks(package, trainer)
    found["steps"] = trainer.global_step
    return found


@pytest.fixture(scope="module")
def connected(folder: Path) -> Outcomes:
    return launch_cases({case: partial(connect_without_a_trainer, *case, folder) for case in CASES}, 1, init=False)


@pytest.mark.parametrize(("package", "name"), CASES)
def test_connecting_before_the_module_has_a_trainer(package: str, name: str, connected: Outcomes) -> None:
    assert connected[package, name] == [
        {
            "connected": True, "saved": True, "set up to validate": name == "ea_pipe", "set up to fit": True,
            "to set up": [0], "after fitting": [0], "steps": 16,
        }
    ]  # fmt: skip


def fit(package: str, name: str, directory: Path) -> tuple[int, str, set[str], torch.Tensor]:
    """Returns how often ``torch.save`` is called for a checkpoint, the sampler, the logged metrics, the weights."""
    counts = []

    class Saving(import_module(package).Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 3:
                with mock.patch("torch.save", wraps=torch.save) as save:
                    trainer.save_checkpoint(directory / f"{package} {name}.ckpt")
                counts.append(save.call_count)

    model, trainer = build(package, name, directory, 2, Saving())
    trainer.fit(model, loader())
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    return counts[0], type(trainer.train_dataloader.sampler).__name__, set(trainer.callback_metrics), weights


@pytest.fixture(scope="module")
def trained(folder: Path) -> Outcomes:
    return launch_cases({case: partial(fit, *case, folder) for case in CASES}, 2, init=False)


@pytest.mark.parametrize(("package", "name"), CASES)
def test_both_distributions(package: str, name: str, trained: Outcomes, folder: Path) -> None:
    """A checkpoint is saved once, by one rank: a script that counts `torch.save` means what is written."""
    outcomes = trained[package, name]
    assert [saves for saves, *_ in outcomes] == [1, 0]
    ranks = torch.load(folder / f"{package} {name}.ckpt", weights_only=True)["pipesync"]["ranks"]
    assert sorted(ranks) == [0, 1]
    for _, sampler, logged, weights in outcomes:
        assert sampler == ("SelDPSampler" if name == "selsync" else "DistributedSampler")
        assert f"{name}/mib_sent" in logged
        assert torch.equal(weights, outcomes[0][3])
