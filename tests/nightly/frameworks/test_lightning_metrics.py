"""What a fit says of its method, with both distributions of the Trainer: metrics, settings, a line at the end."""

from __future__ import annotations

import re
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipesync import SelSync, SelSyncStrategy
from lightning_pipesync.training.registry import METHODS
from tests.conformance.example_method import Averaging
from tests.conformance.methods import register_method
from tests.nightly.frameworks.test_lightning_events import TwoOptimizers
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import raised
from tests.support.lightning_models import Classifier, Memory, regression, said, train_loader, trainer

#: Of a progress bar, which cuts long lines off.
MOST_CHARACTERS = 14
#: What a method says first, of 8 steps.
FIRST_CLAUSES = {
    "averaging": "Averaging: 8 steps",
    "dear": "DeAR: 8 steps with gradients in 1 bucket",
    "ea_pipe": "EAPipe: 8 mini-batches through 2 stages",
    "local_sgd": "LocalSGD: 2 rounds in 8 steps",
    "parameter_server": "ParameterServer: 8 updates in 8 steps of a rank, with a mean staleness of 0",
    "pipe_sgd": "PipeSGD: 7 updates in 8 steps, with a staleness of 1 at the end",
    "selsync": "SelSync: 88% of 8 steps were local",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "local_sgd": {"period": 4},
    "parameter_server": {"policy": "sync"},
    "selsync": {"delta": 1e9},  # only the first step is synchronized
}
PACKAGES = ("lightning.pytorch", "pytorch_lightning")
#: Each method with one of the two.
CASES = [(PACKAGES[index % 2], name) for index, name in enumerate(FIRST_CLAUSES)]


def fit(package: str, name: str, world_size: int, folder: Path, raises_at: int | None = None) -> dict[str, Any]:
    """Trains for 2 epochs of 4 batches on each rank, and returns what it says and logs."""
    if name == "averaging":
        register_method(Averaging)
    strategies = import_module(f"{package}.strategies").StrategyRegistry
    logger = import_module(f"{package}.loggers").CSVLogger(folder, name=f"{package}_{name}_{world_size}")
    run = import_module(package).Trainer(
        strategy=strategies[name]["strategy"](**SETTINGS.get(name, {})), devices=world_size, accelerator="cpu",
        max_epochs=2, logger=logger, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        default_root_dir=folder,
    )  # fmt: skip
    model, samples = regression(package, raises_at), 8 * (1 if name == "ea_pipe" else world_size)
    loader = DataLoader(TensorDataset(torch.randn(samples, 4, generator=torch.Generator().manual_seed(0))), 2)
    with said() as lines:
        error = raised(partial(run.fit, model, loader))
        run.save_checkpoint(Path(logger.log_dir) / "end.ckpt") if error is None else None
    return {
        "error": error,
        "lines": [line for line in lines if line.startswith(METHODS[name].__name__)],
        "metrics": {key: float(value) for key, value in run.callback_metrics.items()},
        "own": model.own_metrics,
        "shown": set(run.progress_bar_metrics),
        "folder": logger.log_dir,
        "settings": getattr(run.strategy, "config", None),
    }


def log_rows(folder: Path, make: type[Classifier], **how: Any) -> tuple[list[Any], int]:
    """Returns the rows, and how often the method was asked for its metrics."""
    memory = Memory()
    run = trainer(SelSyncStrategy(delta=0.1), 2, folder, logger=memory, max_epochs=3, **how)
    with mock.patch.object(SelSync, "metrics", autospec=True, side_effect=SelSync.metrics) as metrics:
        run.fit(make(), train_loader())
    return [(step, set(row)) for step, row in memory.rows], metrics.call_count


#: How gradients are computed, arguments of the Trainer, and the steps that are logged; epochs are besides.
ROWS: list[tuple[type[Classifier], dict[str, Any], list[int]]] = [
    (Classifier, {"log_every_n_steps": 3}, [2, 5, 8, 11, 14, 17, 20, 23]),
    (Classifier, {"log_every_n_steps": 3, "accumulate_grad_batches": 2}, [2, 5, 8, 11]),
    (TwoOptimizers, {"log_every_n_steps": 3}, [2, 5, 8, 11, 14, 17, 20, 23]),
    (Classifier, {"log_every_n_steps": 50}, []),
    (Classifier, {"log_every_n_steps": 0}, []),
]


@pytest.fixture(scope="module")
def trained(folder: Path) -> Outcomes:
    cases: dict[Any, Any] = {case: partial(fit, *case, 2, folder) for case in CASES}
    cases["crash"] = partial(fit, PACKAGES[0], "selsync", 2, folder, raises_at=2)
    for index, (make, how, _) in enumerate(ROWS):
        cases["rows", index] = partial(log_rows, folder, make, **how)
    return launch_cases(cases, 2, init=False)


@pytest.mark.parametrize(("package", "name"), CASES)
def test_the_line_at_the_end(package: str, name: str, trained: Outcomes) -> None:
    """What the method did, what it and DDP send, and how long training waited; on rank 0 only."""
    first, second = trained[package, name]
    [line] = first["lines"]
    assert line.startswith(FIRST_CLAUSES[name])
    assert re.search(r"each rank sent [\d.e-]+ MiB", line)
    of_ddp = f"where DDP sends at least {19 * 4 * 8 / 2**20:.2g} MiB"
    assert (of_ddp in line) == (name != "ea_pipe")
    assert re.search(r"waited for the network \d+% of the time\.$", line)
    assert second["lines"] == []


def test_no_line_after_an_error(trained: Outcomes) -> None:
    for outcome in trained["crash"]:
        assert outcome["error"] is not None
        assert outcome["lines"] == []


def test_alone_it_says_nothing_of_the_network(folder: Path) -> None:
    cases = {name: partial(fit, PACKAGES[0], name, 1, folder) for name in ("dear", "selsync")}
    outcomes = launch_cases(cases, 1, init=False)
    assert outcomes["selsync"][0]["lines"] == ["SelSync: 88% of 8 steps were local."]
    [line] = outcomes["dear"][0]["lines"]
    assert "network" not in line
    assert "DDP" not in line


@pytest.mark.parametrize(("package", "name"), CASES)
def test_the_metrics_of_an_epoch_are_those_of_all_ranks(package: str, name: str, trained: Outcomes) -> None:
    """Each is declared, reduced as declared, and the same on all ranks; so are the two of the progress bar."""
    outcomes = trained[package, name]
    infos, shown = METHODS[name].metric_infos, METHODS[name].shown_metrics
    logged = [{key: value for key, value in outcome["metrics"].items() if "/rank_" not in key} for outcome in outcomes]
    assert logged[0] == logged[1]
    names = {key.removeprefix(f"{name}/") for key in logged[0] if "/" in key}
    assert "mib_sent" in names
    assert names <= infos.keys()
    assert names == outcomes[0]["own"].keys()
    for metric in names - {"exposed_seconds", "mib_beside_steps"}:  # these grow in the meantime
        own = [outcome["own"][metric] for outcome in outcomes if metric in outcome["own"]]
        assert logged[0][f"{name}/{metric}"] == pytest.approx(infos[metric].reduce(own), rel=1e-6), metric
    assert outcomes[0]["shown"] == set(shown.values())
    assert len(shown) <= 2
    assert all(len(short) <= MOST_CHARACTERS for short in shown.values())


@pytest.mark.parametrize("index", range(len(ROWS)))
def test_every_row_has_the_metrics(index: int, trained: Outcomes) -> None:
    """3 epochs of 8 batches; on other batches than those that are logged nothing is measured."""
    _, how, steps = ROWS[index]
    for rank, (rows, measured) in enumerate(trained["rows", index]):
        in_step = [(step, names) for step, names in rows if "loss" in names]
        in_epoch = [(step, names) for step, names in rows if "loss" not in names]
        assert [step for step, _ in in_step] == steps
        for _, names in in_step:
            assert {"selsync/lssr", f"selsync/mib_sent/rank_{rank}", f"selsync/exposed_seconds/rank_{rank}"} <= names
            assert "selsync/mib_sent" not in names
        assert [step for step, _ in in_epoch] == [
            8 * (epoch + 1) // how.get("accumulate_grad_batches", 1) - 1 for epoch in range(3)
        ]
        for _, names in in_epoch:
            assert {"selsync/lssr", "selsync/mib_sent", "selsync/exposed_seconds"} <= names
        assert measured == len(rows) + 2  # at the start, and for the line at the end


@pytest.mark.parametrize(("package", "name"), CASES)
def test_settings_are_among_the_hyperparameters(package: str, name: str, trained: Outcomes) -> None:
    """The module's stay, and a checkpoint of it loads with the file of the hyperparameters."""
    outcome = trained[package, name][0]
    path = Path(outcome["folder"]) / "hparams.yaml"
    hyperparameters = yaml.safe_load(path.read_text())
    assert hyperparameters["width"] == 3
    logged = hyperparameters["pipesync"]
    assert logged.pop("method") == name
    for setting, value in logged.items():
        expected = getattr(outcome["settings"], setting)
        assert value == (list(expected) if isinstance(expected, tuple) else expected)
    assert SETTINGS.get(name, {}).items() <= logged.items()
    loaded = type(regression(package)).load_from_checkpoint(path.with_name("end.ckpt"), hparams_file=path)
    assert loaded.hparams["width"] == 3
