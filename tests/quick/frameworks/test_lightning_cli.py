"""LightningCLI: the strategies' settings on the command line and in a file, with their docstrings as help."""

from __future__ import annotations

import inspect
import math
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI

from lightning_pipesync import DeARStrategy, EAPipeStrategy, PipeSGDStrategy, SelSyncStrategy, TopK
from tests.support.harness import on_ranks
from tests.support.lightning_models import Classifier, train_loader

STRATEGIES = {cls.__name__: cls for cls in (DeARStrategy, EAPipeStrategy, PipeSGDStrategy, SelSyncStrategy)}
QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


def cli(*arguments: str) -> LightningCLI:
    """The CLI of a Classifier, which has read its arguments and made a Trainer."""
    with mock.patch.object(sys, "argv", ["train.py", "--trainer.accelerator=cpu", "--trainer.devices=1", *arguments]):
        return LightningCLI(Classifier, run=False)


def of_class(name: str, **settings: str) -> list[str]:
    """Arguments for a strategy by its class, with settings."""
    chosen = [f"--trainer.strategy.{setting}={value}" for setting, value in settings.items()]
    return [f"--trainer.strategy=lightning_pipesync.{name}", *chosen]


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("SelSyncStrategy", {"delta": "0.4"}, {"delta": 0.4}),
        ("SelSyncStrategy", {"delta": "auto", "lssr": "0.9"}, {"delta": "auto", "lssr": 0.9}),
        (
            "SelSyncStrategy",
            {"delta": ".inf", "injection": "[0.5,0.25]"},
            {"delta": math.inf, "injection": (0.5, 0.25)},
        ),
        ("SelSyncStrategy", {"compression": "lightning_pipesync.TopK"}, {"compression": TopK()}),
        ("SelSyncStrategy", {"compression": "TopK", "compression.ratio": "0.05"}, {"compression": TopK(ratio=0.05)}),
        ("DeARStrategy", {"search_mb": "[1,50]", "fusion": "bo"}, {"search_mb": (1, 50), "fusion": "bo"}),
        ("DeARStrategy", {"elementwise": "[torch.optim.AdamW]"}, {"elementwise": (torch.optim.AdamW,)}),
        ("PipeSGDStrategy", {"pipeline_level": "2", "drain": "true"}, {"pipeline_level": 2, "drain": True}),
        ("EAPipeStrategy", {"split": "[2]", "algorithm": "gpipe"}, {"split": (2,), "algorithm": "gpipe"}),
        ("EAPipeStrategy", {"split": "parameters"}, {"split": "parameters"}),
    ],
)
def test_settings_on_the_command_line(name: str, settings: dict[str, str], expected: dict[str, Any]) -> None:
    strategy = cli(*of_class(name, **settings)).trainer.strategy
    assert isinstance(strategy, STRATEGIES[name])
    assert {setting: getattr(strategy.config, setting) for setting in expected} == expected


def test_a_plain_name_and_the_sizes_of_the_device_mesh() -> None:
    assert cli("--trainer.strategy", "dear").trainer.strategy.name == "dear"
    sizes = {"ranks_per_replica": "8", "tensor_parallel_size": "2"}
    layout = cli(*of_class("DeARStrategy", **sizes)).trainer.strategy.layout
    assert (layout.ranks_per_replica, layout.tensor_parallel_size) == (8, 2)


def parameters_of(name: str) -> dict[str, inspect.Parameter]:
    parameters = dict(inspect.signature(STRATEGIES[name]).parameters)
    assert len(parameters) > 10
    return parameters


@pytest.mark.parametrize("name", STRATEGIES)
def test_help_shows_the_docstrings(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # no line of the docstring is broken
    with pytest.raises(SystemExit):
        cli(f"--trainer.strategy.help=lightning_pipesync.{name}")
    shown = re.sub(r"\s+", " ", capsys.readouterr().out).split(" --trainer.strategy.")
    documented = re.findall(
        r"^    (\w+): (.+)$", inspect.getdoc(STRATEGIES[name]).partition("Raises:")[0], re.MULTILINE
    )
    assert {setting for setting, _ in documented} == set(parameters_of(name))
    for setting, text in documented:
        assert any(entry.split(" ")[0].rstrip("+") == setting and text in entry for entry in shown), setting


@pytest.mark.parametrize("name", STRATEGIES)
def test_print_config_shows_every_setting(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli(*of_class(name, timeout_s="60"), "--print_config")
    strategy = yaml.safe_load(capsys.readouterr().out)["trainer"]["strategy"]
    assert strategy["class_path"] == f"lightning_pipesync.{name}"
    assert list(strategy["init_args"]) == list(parameters_of(name))
    assert strategy["init_args"]["timeout_s"] == 60


def test_what_is_wrong_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A setting that does not exist, on the command line and in a file, and a bad value."""
    config = {"class_path": "lightning_pipesync.SelSyncStrategy", "init_args": {"dleta": 0.4}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"trainer": {"strategy": config}}))
    for arguments in (of_class("SelSyncStrategy", dleta="0.4"), ["--config", str(tmp_path / "config.yaml")]):
        with pytest.raises(SystemExit) as ended:
            cli(*arguments)
        assert ended.value.code != 0
        assert "'dleta'" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"delta must be at least 0, got -1\.0"):
        cli(*of_class("SelSyncStrategy", delta="-1"))


class Data(Classifier):
    """A Classifier with the data to train on."""

    def train_dataloader(self) -> Any:
        return train_loader()


def fit_by_file(config: Path) -> tuple[torch.Tensor, Any]:
    """The weights that the training of a file has led to, and the settings of its strategy."""
    with mock.patch.object(sys, "argv", ["train.py", "fit", "--config", str(config)]):
        run = LightningCLI(Data)
    return run.model.weights(), run.trainer.strategy.config


def test_a_file_trains(tmp_path: Path) -> None:
    codec = {"class_path": "lightning_pipesync.TopK", "init_args": {"ratio": 0.5}}
    settings = {"delta": 0.05, "compression": codec}
    strategy = {"class_path": "lightning_pipesync.SelSyncStrategy", "init_args": settings}
    trainer = {**QUIET, "devices": 2, "max_epochs": 1, "default_root_dir": str(tmp_path), "strategy": strategy}
    file = tmp_path / "given.yaml"
    file.write_text(yaml.safe_dump({"seed_everything": 1, "trainer": trainer}))
    (weights, used), (other, _) = on_ranks(fit_by_file, 2, file, init=False)
    assert torch.equal(weights, other)
    assert not torch.equal(weights, Classifier().weights())
    assert (used.delta, used.compression) == (0.05, TopK(ratio=0.5))

    # What the CLI has kept of the run trains the same again.
    (kept,) = tmp_path.rglob("config.yaml")
    kept = kept.rename(tmp_path / "kept.yaml")
    assert torch.equal(on_ranks(fit_by_file, 2, kept, init=False)[0][0], weights)
