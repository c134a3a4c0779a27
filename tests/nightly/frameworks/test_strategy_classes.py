"""The strategy classes state each method's settings as arguments, which type checkers see and which need no sources."""

from __future__ import annotations

import inspect
import runpy
import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

import pytest

import lightning_pipesync
from lightning_pipesync import fabric, register_method
from lightning_pipesync.training.registry import METHODS
from tests.conformance.example_method import Averaging, AveragingConfig
from tests.support.harness import on_ranks

ROOT = Path(__file__).parents[3]


def test_the_classes_are_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    for path, text in runpy.run_path(str(ROOT / "docs" / "strategy_classes.py"))["files"]():
        assert path.read_text() == text, f"run python docs/strategy_classes.py, which writes {path.name}"


@pytest.mark.parametrize("name", METHODS)
def test_arguments_are_the_settings(name: str) -> None:
    """With their types and defaults; settings that the Trainer replaces by its arguments are none."""
    method = METHODS[name]
    module = lightning_pipesync.lightning
    arguments = inspect.signature(getattr(module, f"{method.__name__}Strategy")).parameters
    types = get_type_hints(method.config_type)
    stated = {field.name: field.default for field in fields(method.config_type)}
    expected = {key: default for key, default in stated.items() if key not in method.config_type.set_by_trainer}
    assert {key: arguments[key].default for key in expected} == expected
    given = get_type_hints(getattr(module, f"{method.__name__}Strategy").__init__)
    assert {key: given[key] for key in expected} == {key: types[key] for key in expected}
    assert not set(arguments) & set(method.config_type.set_by_trainer)


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


def test_former_names_are_accepted_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match="Set ranks_per_replica=2 in place of replicas_per_group=2"):
        strategy: Any = lightning_pipesync.LocalSGDStrategy(replicas_per_group=2)  # type: ignore[call-arg]
    assert strategy.config.ranks_per_replica == 2


def build_without_sources() -> None:
    def refuse(*_: Any) -> NoReturn:
        raise OSError("could not get source code")

    for name in [name for name in sys.modules if name.partition(".")[0] == "lightning_pipesync"]:
        del sys.modules[name]
    inspect.getsource = inspect.getsourcelines = inspect.findsource = refuse
    package, of_fabric = import_module("lightning_pipesync"), import_module("lightning_pipesync.fabric")
    assert package is not lightning_pipesync
    assert package.DeARStrategy(fusion="none").config.fusion == "none"
    assert "settings are those of :class:`DeARConfig`" in (inspect.getdoc(of_fabric.DeARFabricStrategy) or "")
    assert "fusion: Tensor fusion" in (inspect.getdoc(package.DeARStrategy) or "")


def test_strategies_are_built_without_sources() -> None:
    """As in a package of compiled files."""
    on_ranks(build_without_sources, 1, init=False)
