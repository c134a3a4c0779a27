"""What a fit says of its method, with both distributions of the Trainer: a line at the end, metrics, settings."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from lightning_utilities.core import rank_zero
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipesync.core.comm.traffic import Traffic
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.lightning import fit_summary
from lightning_pipesync.methods.metric_info import MetricInfo, counted
from lightning_pipesync.training.registry import METHODS
from tests.conformance.example_method import Averaging
from tests.conformance.methods import register_method
from tests.support.case_table import Outcomes, launch_cases

#: Of a progress bar, which cuts long lines off.
MOST_CHARACTERS = 14

#: What a method says first, of 8 steps.
FIRST_CLAUSES = {
    "averaging": "Averaging: 8 steps",
    "dear": "DeAR: 8 steps with gradients in 1 bucket",
    "ea_pipe": "EAPipe: 8 mini-batches through 2 stages",
    "local_sgd": "LocalSGD: 2 rounds in 8 steps",
    "parameter_server": r"ParameterServer: 8 updates in 8 steps of a rank, with a mean staleness of 0",
    "pipe_sgd": "PipeSGD: 7 updates in 8 steps, with a staleness of 1 at the end",
    "selsync": r"SelSync: 88% of 8 steps were local",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "local_sgd": {"period": 4},
    "parameter_server": {"policy": "sync"},
    "selsync": {"delta": 1e9},  # only the first step is synchronized
}
PACKAGES = ("lightning.pytorch", "pytorch_lightning")
CASES = [(package, name) for package in PACKAGES for name in FIRST_CLAUSES]


def build(package: str, raises_at: int | None = None) -> Any:
    library = import_module(package)

    class Regression(library.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self, width: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layers = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1))
            self.own_metrics: dict[str, float] = {}

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            if batch_idx == raises_at:
                raise ArithmeticError("in a step")
            return self.layers(batch[0]).square().mean()

        def on_train_epoch_end(self) -> None:
            self.own_metrics = self.trainer.strategy.method.metrics()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    torch.manual_seed(0)
    return Regression()


def loader(world_size: int) -> DataLoader:
    """Gives each rank 4 batches, which with a pipeline all ranks get."""
    generator = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(8 * world_size, 4, generator=generator)), batch_size=2)


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


def fit(
    package: str, name: str, world_size: int, directory: Path, raises_at: int | None = None, **kwargs: Any
) -> dict[str, Any]:
    """Trains for 2 epochs of 4 batches, and returns what it says and logs."""
    library = import_module(package)
    if name == "averaging":
        register_method(Averaging)
    strategies = import_module(f"{package}.strategies").StrategyRegistry
    logger = import_module(f"{package}.loggers").CSVLogger(directory, name=f"{package}_{name}_{world_size}")
    run = library.Trainer(
        strategy=strategies[name]["strategy"](**SETTINGS.get(name, {})), devices=world_size, accelerator="cpu",
        max_epochs=2, logger=logger, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        default_root_dir=directory, **kwargs,
    )  # fmt: skip
    model, gathers = build(package, raises_at), []

    def gather(transport: Transport, value: Any) -> list[Any]:
        gathers.append(value)
        return original(transport, value)

    original = Transport.gather_objects
    batches = loader(1 if name == "ea_pipe" else world_size)
    error = None
    with said() as lines, mock.patch.object(Transport, "gather_objects", gather):
        try:
            run.fit(model, batches)
            run.save_checkpoint(Path(logger.log_dir) / "end.ckpt")
        except Exception as raised:
            error = str(raised)
    return {
        "error": error,
        "lines": lines,
        "metrics": {key: float(value) for key, value in run.callback_metrics.items()},
        "own": model.own_metrics,
        "shown": set(run.progress_bar_metrics),
        "gathers": len(gathers),
        "folder": logger.log_dir,
        "settings": getattr(run.strategy, "config", None),
    }


def line_in(outcome: dict[str, Any], name: str) -> str:
    [line] = [line for line in outcome["lines"] if line.startswith(METHODS[name].__name__)]
    return line


@pytest.fixture(scope="module")
def trained(folder: Path) -> Outcomes:
    cases: dict[Any, Any] = {case: partial(fit, *case, 2, folder) for case in CASES}
    cases["rare rows"] = partial(fit, PACKAGES[0], "selsync", 2, folder, log_every_n_steps=50)
    cases["each step"] = partial(fit, PACKAGES[0], "selsync", 2, folder, log_every_n_steps=1)
    for package in PACKAGES:
        cases["crash", package] = partial(fit, package, "selsync", 2, folder, raises_at=2)
    return launch_cases(cases, 2, init=False)


@pytest.mark.parametrize(("package", "name"), CASES)
def test_the_line_at_the_end(package: str, name: str, trained: Outcomes) -> None:
    """What the method did, what it and DDP send, and how long training waited; on rank 0 only."""
    first, second = trained[package, name]
    assert not [line for line in second["lines"] if line.startswith(METHODS[name].__name__)]
    number = r"[\d.e-]+"
    of_ddp = "" if name == "ea_pipe" else f", where DDP sends at least {19 * 4 * 8 / 2**20:.2g} MiB"
    network = rf"each rank sent {number} MiB{re.escape(of_ddp)}; training waited for the network \d+% of the time\."
    assert re.fullmatch(f"{FIRST_CLAUSES[name]}; {network}", line_in(first, name))


@pytest.mark.parametrize("package", PACKAGES)
def test_no_line_after_an_error(package: str, trained: Outcomes) -> None:
    for outcome in trained["crash", package]:
        assert outcome["error"] is not None
        assert not [line for line in outcome["lines"] if line.startswith("SelSync")]


class Stub(Averaging):
    """Sends 3 MiB and waits for 2 of 50 seconds on rank 0, 6 MiB and 7 seconds on its other rank."""

    ddp_bytes = 0.05 * 2**20

    def __init__(self, backend: str) -> None:
        """Attaches to nothing."""
        self.transport = mock.Mock(job=mock.Mock(rank=0, world_size=2), backend=backend, traffic=Traffic())
        self.transport.job.gather_objects = lambda mine: [mine, (400, 6 * 2**20, 7 / 50)]

    def count(self, mib: int, seconds: float) -> None:
        traffic = self.transport.traffic
        traffic.bytes_sent["all_reduce"], traffic.seconds_waited["all_reduce"] = mib * 2**20, seconds

    def metrics(self) -> dict[str, float]:
        return {}


SENT = "each rank sent 4.5 MiB, where DDP sends at least 20 MiB"
WAITED = "training waited for the network 9% of the time"


@pytest.mark.parametrize(
    ("backend", "counts", "line"),
    [
        ("gloo", True, f"Stub: 400 steps; {SENT}; {WAITED}."),
        ("nccl", True, f"Stub: 400 steps; {SENT}."),
        ("gloo", False, "Stub: 400 steps."),
    ],
)
def test_what_is_said_of_the_network(backend: str, counts: bool, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Means over the ranks, of what has been sent and waited since the start; nothing of what was not counted."""
    monkeypatch.setattr(Stub, "counts_traffic", counts)
    monkeypatch.setattr(fit_summary, "perf_counter", iter([10.0, 60.0]).__next__)
    method = Stub(backend)
    method.count(1, 1.0)
    summary = fit_summary.FitSummary(method, 100)
    method.count(4, 3.0)
    assert summary.text(500) == line


def test_one_rank_says_nothing_of_a_network(tmp_path: Path) -> None:
    cases = {name: partial(fit, PACKAGES[0], name, 1, tmp_path) for name in ("dear", "selsync")}
    outcomes = launch_cases(cases, 1, init=False)
    assert line_in(outcomes["selsync"][0], "selsync") == "SelSync: 88% of 8 steps were local."
    assert "network" not in line_in(outcomes["dear"][0], "dear")
    assert "DDP" not in line_in(outcomes["dear"][0], "dear")


@pytest.mark.parametrize(("package", "name"), CASES)
def test_the_metrics_of_an_epoch_are_those_of_all_ranks(package: str, name: str, trained: Outcomes) -> None:
    """Each is declared, reduced as declared, and the same on all ranks; so are the two of the progress bar."""
    outcomes = trained[package, name]
    infos, shown = METHODS[name].metric_infos, METHODS[name].shown_metrics
    logged = [{key: value for key, value in outcome["metrics"].items() if "/rank_" not in key} for outcome in outcomes]
    assert logged[0] == logged[1]
    names = {key.removeprefix(f"{name}/") for key in logged[0] if "/" in key}
    assert names <= infos.keys()
    assert names == outcomes[0]["own"].keys()
    # These grow in the meantime: threads of the servers still send.
    growing = {"exposed_seconds", *(("mib_sent",) if name == "parameter_server" else ())}
    for metric in names - growing:
        own = [outcome["own"][metric] for outcome in outcomes if metric in outcome["own"]]
        assert logged[0][f"{name}/{metric}"] == pytest.approx(infos[metric].reduce(own), rel=1e-6), metric
    assert outcomes[0]["shown"] == set(shown.values())
    assert len(shown) <= 2
    assert all(len(short) <= MOST_CHARACTERS for short in shown.values())


def test_what_a_metric_is_reduced_to() -> None:
    assert MetricInfo(over_ranks="max").reduce([1.0, 4.0, 2.0]) == 4.0
    assert MetricInfo(over_ranks="mean").reduce([1.0, 4.0, 4.0]) == 3.0
    assert MetricInfo(over_ranks="rank 0").reduce([2.0]) == 2.0
    assert MetricInfo(over_ranks="same").reduce([2.0, 2.0]) == 2.0


def test_how_numbers_are_said() -> None:
    assert [counted(number, "step") for number in (0, 1.0, 2, 2e6)] == ["0 steps", "1 step", "2 steps", "2000000 steps"]


def test_rows_of_steps_need_no_collective(trained: Outcomes) -> None:
    for rare, each in zip(trained["rare rows"], trained["each step"], strict=True):
        assert rare["gathers"] == each["gathers"]
        assert rare["own"]["mib_sent"] == each["own"]["mib_sent"]


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
    loaded = type(build(package)).load_from_checkpoint(path.with_name("end.ckpt"), hparams_file=path)
    assert loaded.hparams["width"] == 3
