"""Each strategy by its name in both distributions of the Trainer: logged, saved and averaged in a fit; connected."""

from __future__ import annotations

import csv
import re
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
from tests.support.lightning_models import regression, said

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
NAMES = ("dear", "ea_pipe", "local_sgd", "parameter_server", "pipe_sgd", "selsync")
CASES = [(package, name) for package in PACKAGES for name in NAMES]
#: Whose weights are averaged, and whose module is connected before it has a Trainer, with one distribution each.
AVERAGED = CASES[::2]
CONNECTED = [(PACKAGES[index % 2], name) for index, name in enumerate(NAMES)]


def build(package: str, name: str, folder: Path, world_size: int, *callbacks: Any, **how: Any) -> tuple[Any, Any]:
    """A module and a Trainer of one of the two distributions."""
    library = import_module(package)
    trainer = library.Trainer(
        strategy=name, devices=world_size, accelerator="cpu", enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, callbacks=list(callbacks),
        **{"logger": False, "enable_checkpointing": False, "max_epochs": 1, **how},
    )  # fmt: skip
    return regression(package), trainer


def loader() -> DataLoader:
    return DataLoader(TensorDataset(torch.randn(16, 4, generator=torch.Generator().manual_seed(0))), batch_size=2)


def flat(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def fit(package: str, name: str, folder: Path) -> dict[str, Any]:
    """Returns how often ``torch.save`` is called for a checkpoint, the sampler, metrics, and weights."""
    folder, counts = folder / f"{package} {name}", []
    library = import_module(f"{package}.callbacks")

    class Saving(import_module(package).Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 3:
                with mock.patch("torch.save", wraps=torch.save) as save:
                    trainer.save_checkpoint(folder / "third.ckpt")
                counts.append(sum(isinstance(call.args[0], dict) for call in save.call_args_list))

    best = library.ModelCheckpoint(folder, "best", monitor="val_loss")
    callbacks = [Saving(), best]
    if (package, name) in AVERAGED and name != "ea_pipe":
        callbacks.append(library.EMAWeightAveraging(decay=0.5))
    logger = import_module(f"{package}.loggers").CSVLogger(folder)
    how = {"logger": logger, "enable_checkpointing": True, "log_every_n_steps": 1, "max_epochs": 2}
    model, trainer = build(package, name, folder, 2, *callbacks, **how)
    with said() as lines:
        trainer.fit(model, loader(), loader())
    return {
        "lines": [line for line in lines if "each rank sent" in line],
        "shown": {short: float(value) for short, value in trainer.progress_bar_metrics.items()},
        "saves": counts[0],
        "sampler": type(trainer.train_dataloader.sampler).__name__,
        "metrics": {key: float(value) for key, value in trainer.callback_metrics.items() if "/rank_" not in key},
        "best": best.best_model_path,
        "weights": flat(model),
        "validated": model.validated,
    }


@pytest.fixture(scope="module")
def trained(folder: Path) -> Outcomes:
    return launch_cases({case: partial(fit, *case, folder) for case in CASES}, 2, init=False)


@pytest.mark.parametrize(("package", "name"), CASES)
def test_a_fit(package: str, name: str, trained: Outcomes, folder: Path) -> None:
    """Ranks validate and end with the same weights, and have the same metrics, which a logger has.

    A checkpoint is written once, by one rank.
    A script that counts `torch.save` means what is written.
    """
    outcomes = trained[package, name]
    assert [outcome["saves"] for outcome in outcomes] == [1, 0]
    saved = torch.load(folder / f"{package} {name}" / "third.ckpt", weights_only=True)
    assert sorted(saved["pipesync"]["ranks"]) == [0, 1]
    for outcome in outcomes:
        assert outcome["sampler"] == ("SelDPSampler" if name == "selsync" else "DistributedSampler")
        assert {f"{name}/mib_sent", "val_loss"} <= outcome["metrics"].keys()
        assert outcome["metrics"] == outcomes[0]["metrics"]
        assert torch.equal(outcome["weights"], outcomes[0]["weights"])
        if name != "ea_pipe":  # whose ranks have their own layers' weights
            assert torch.equal(outcome["validated"], outcomes[0]["validated"])
        assert outcome["weights"].isfinite().all()
        assert outcome["best"] == outcomes[0]["best"]
    best = torch.load(outcomes[0]["best"], weights_only=True)["state_dict"]
    if (package, name) not in AVERAGED:  # the last validation was the best, after which nothing was trained
        assert torch.equal(torch.cat([value.flatten() for value in best.values()]), outcomes[0]["weights"])


@pytest.mark.parametrize(("package", "name"), CASES)
def test_what_was_sent_is_one_number(package: str, name: str, trained: Outcomes, folder: Path) -> None:
    """A logger, the progress bar and the line at the end leave out validations, checkpoints and measurements."""
    outcome = trained[package, name][0]
    sent, beside = (outcome["metrics"][f"{name}/{metric}"] for metric in ("mib_sent", "mib_beside_steps"))
    [table] = (folder / f"{package} {name}").rglob("metrics.csv")
    with table.open() as file:
        logged = [float(row[f"{name}/mib_sent"]) for row in csv.DictReader(file) if row[f"{name}/mib_sent"]]
    assert logged[-1] == pytest.approx(sent, rel=1e-6)
    assert outcome["shown"].get("sent_MiB", sent) == sent
    [line] = outcome["lines"]
    told = re.search(r"each rank sent ([\d.e-]+) MiB", line)
    assert told
    assert float(told[1]) == pytest.approx(sent, rel=0.05)  # two digits
    assert 0 < sent < 0.1
    if name == "dear":  # it measures the network
        assert beside > 1
        assert "; besides, " in line


def connect(package: str, name: str, folder: Path) -> None:
    """Goes through what the Trainer does step by step, the module's Trainer last, then validates and fits."""
    callback = import_module(package).Callback
    model, trainer = build(package, name, folder, 1, callback())
    type(trainer.strategy)().connect(model)  # a strategy of no Trainer, a module of none
    trainer.strategy.connect(model)
    assert trainer.strategy.lightning_module is trainer.lightning_module is model
    path = folder / f"{package}-{name}.ckpt"
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert all(torch.equal(saved[key], value) for key, value in model.state_dict().items())
    trainer.state.fn = "fit"
    model.trainer = trainer
    trainer.strategy.setup_environment()
    trainer.strategy.setup(trainer)
    assert trainer.strategy.method is not None
    trainer.strategy.teardown()

    model, trainer = build(package, name, folder, 1, callback())
    trainer.strategy.connect(model)
    trainer.validate(model, loader(), verbose=False)
    trainer.fit(model, loader(), loader())
    trainer.fit_loop.max_epochs = 2
    trainer.callbacks.insert(0, callback())  # as a Trainer itself puts those that tune first
    trainer.fit(model, loader())
    assert trainer.global_step == 16
    assert all(isinstance(one, callback) for one in trainer.callbacks)
    names = [type(one).__name__ for one in trainer.callbacks]
    ours = [index for index, name in enumerate(names) if name in ("PipeSyncCallback", "PipelineCallback")]
    assert ours == [0], "the strategy's callback comes first, once"


def test_connecting_before_the_module_has_a_trainer(folder: Path) -> None:
    """As any strategy may be, also between trainings."""
    outcomes = launch_cases({case: partial(connect, *case, folder) for case in CONNECTED}, 1, init=False)
    assert [outcomes[case] for case in CONNECTED] == [[None]] * len(CONNECTED)
