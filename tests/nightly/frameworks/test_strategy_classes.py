"""The strategy classes have each method's settings as arguments, for type checkers in stubs, and need no sources."""

from __future__ import annotations

import inspect
import runpy
import subprocess
import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import pytest

import lightning_pipesync
from lightning_pipesync import fabric, register_method
from lightning_pipesync.training.registry import METHODS
from tests.conformance.example_method import Averaging, AveragingConfig
from tests.support.harness import launch

ROOT = Path(__file__).parents[3]


def test_the_classes_are_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    for path, text in runpy.run_path(str(ROOT / "docs" / "strategy_classes.py"))["files"]():
        assert path.read_text() == text, f"run python docs/strategy_classes.py, which writes {path.name}"


def test_arguments_are_described_as_the_settings_are() -> None:
    for strategy in (lightning_pipesync.DeARStrategy, fabric.DeARFabricStrategy):
        described = inspect.getdoc(strategy) or ""
        assert "fusion: Tensor fusion" in described
        assert "ranks_per_replica: Number of neighboring ranks" in described
        assert "accelerator: as in DDPStrategy." in described


def test_a_users_method_has_strategies() -> None:
    for method in (Averaging, Averaging, METHODS["ea_pipe"]):  # as often as a user likes, also with a pipeline
        register_method(method)
    made: list[Any] = [lightning_pipesync.lightning.AveragingStrategy, fabric.AveragingFabricStrategy]  # type: ignore[attr-defined]
    for strategy in made:
        names = [field.name for field in fields(AveragingConfig)]
        assert list(inspect.signature(strategy).parameters)[: len(names)] == names
        assert strategy(**{names[0]: 3}).config == AveragingConfig(**{names[0]: 3})
        with pytest.raises(ValueError, match="has no setting 'none_such'"):
            strategy(none_such=3)


def build_without_sources() -> None:
    def refuse(*_: Any) -> NoReturn:
        raise OSError("could not get source code")

    for name in [name for name in sys.modules if name.partition(".")[0] == "lightning_pipesync"]:
        del sys.modules[name]
    inspect.getsource = inspect.getsourcelines = inspect.findsource = refuse
    package, of_fabric = import_module("lightning_pipesync"), import_module("lightning_pipesync.fabric")
    assert package is not lightning_pipesync
    assert package.DeARStrategy(fusion="none").config.fusion == "none"
    for strategy in (package.DeARStrategy, of_fabric.DeARFabricStrategy):
        assert "fusion: see :class:`DeARConfig`" in (inspect.getdoc(strategy) or "")


def test_strategies_are_built_without_sources() -> None:
    """As in a package of compiled files; in a process of its own, which imports all anew."""
    launch(build_without_sources, 1, init=False)


IN_ANY_ORDER = """
import importlib, os, warnings
import torch._dynamo, torch.distributed.fsdp, torchmetrics  # once for all, since Lightning takes seconds to import them
import lightning_pipesync
warnings.filterwarnings("error", message=".*are not registered")
for first in (
    "lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric", "lightning_pipesync.lightning",
    "lightning_pipesync.fabric", "lightning_pipesync.fabric.private", "lightning_pipesync.lab.plan.callback",
):
    if not (child := os.fork()):
        importlib.import_module(first)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, first
"""


def test_whatever_is_imported_first_registers_the_strategies() -> None:
    result = subprocess.run([sys.executable, "-c", IN_ANY_ORDER], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
