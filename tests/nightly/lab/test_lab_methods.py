"""A method that a user registers is benchmarked and planned, with no line outside its folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_pipesync.cli import main
from lightning_pipesync.lab.plan.measure import plan_for
from lightning_pipesync.lab.plan.model import PlanSettings
from lightning_pipesync.lab.plan.predictions import predict
from lightning_pipesync.lab.plan.report import as_markdown, to_copy
from lightning_pipesync.lab.plan.saved import of_result
from lightning_pipesync.lab.plan.trials import run_in_turns
from lightning_pipesync.lab.plan.verdict import verdict_of
from lightning_pipesync.lab.plan.work import measure_work
from lightning_pipesync.methods.laboratory import LabEntry, Prediction
from lightning_pipesync.training.registry import METHODS
from tests.conformance import methods
from tests.nightly.benchmarks.bench_runs import result_of
from tests.support.harness import on_ranks

assert "averaging" in methods.METHODS, "the import registers it"

ROOT = Path(__file__).parents[3]


@pytest.mark.usefixtures("forked_ranks")
def test_the_step_of_a_registered_method_is_timed(tmp_path: Path) -> None:
    options = "--scale 0.001 --steps 1 --rounds 1 --bucket_mb 1 --methods ddp averaging averaging:bucket_mb=0.5"
    result = result_of("bench step", options, tmp_path)
    candidates = {one["name"]: one for one in result["runs"][0]["candidates"]}
    assert list(candidates)[1:] == ["DDP, 1 MiB", "averaging", "averaging (bucket_mb=0.5)"]
    assert all(one["seconds"][0] > 0 for one in candidates.values())
    assert candidates["averaging"]["limit"] > candidates["DDP, 1 MiB"]["limit"], "nothing is hidden"


@pytest.mark.usefixtures("forked_ranks")
def test_a_registered_method_trains_a_task_as_ddp_does(tmp_path: Path) -> None:
    result = result_of("bench converge", "--epochs 1 --evaluations 2 --steps 8 --methods ddp averaging", tmp_path)
    ddp, averaging = ([point["quality"] for point in run["points"]] for run in result["runs"])
    assert averaging == ddp


def plan() -> dict[str, Any]:
    """Measures, predicts, and runs what is predicted of the method beside DDP."""
    settings = PlanSettings("tests.nightly.lab.test_plan:small_model", 1.0, 1.0, steps=1, rounds=1)
    model = settings.build()
    result = plan_for(measure_work(model), model.module, asdict(settings), lambda _: None)
    predictions = [one for one in predict(*of_result(result)[:2]) if one.method in ("ddp", "averaging")]
    return {**result, "measured": run_in_turns(predictions, settings, lambda _: None)}


def test_a_registered_method_is_planned() -> None:
    for result in on_ranks(plan, 2):
        assert len(result["measured"]["averaging"]["seconds"]) == 1
        text = as_markdown(*of_result(result))
        assert "      averaging" in text
        assert "of a step waits for the network" in text


def test_what_to_type_for_a_registered_method() -> None:
    found = [Prediction("ddp", {"bucket_mb": 25.0}, 0.2), Prediction("averaging", {"bucket_mb": 1.0}, 0.1)]
    lines = "".join(to_copy(verdict_of(found, {}), run=False))
    assert "from lightning_pipesync import AveragingStrategy" in lines
    assert "Trainer(strategy=AveragingStrategy(bucket_mb=1.0))" in lines
    assert "method: averaging" in lines


OF_USER = """
import lightning_pipesync
from tests.conformance.example_method import Averaging

class OfUser(Averaging):
    name = "of_user"

lightning_pipesync.register_method(OfUser)
"""


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, with modules of a user; they and what they register are forgotten afterwards."""
    (tmp_path / "user_methods.py").write_text(OF_USER)
    (tmp_path / "without_methods.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command adds the working directory
    yield tmp_path
    METHODS.pop("of_user", None)
    for name in ("user_methods", "without_methods"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--import"], "--import needs the name of a module."),
        (["--import", "not_there", "plan"], "--import not_there: ModuleNotFoundError: No module named 'not_there'."),
        (["--import=without_methods", "plan"], "--import without_methods registers no method"),
    ],
)
@pytest.mark.usefixtures("user_folder")
def test_a_module_without_methods_is_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert f"pipesync: error: {said}" in capsys.readouterr().err


@pytest.mark.usefixtures("forked_ranks")
def test_a_method_in_a_module_of_the_user_is_planned(user_folder: Path) -> None:
    options = ["--model", "tests.nightly.lab.test_plan:small_model", "--steps", "1", "--rounds", "0", "--output", "."]
    assert main(["--import", "user_methods", "plan", *options]) == 0
    assert "      of_user" in (user_folder / "plan.md").read_text()


def test_the_step_of_a_method_in_a_module_of_the_user_is_timed(user_folder: Path) -> None:
    """By the installed command, whose ranks are processes of their own that have to find the module."""
    options = ["--scale", "0.001", "--steps", "1", "--rounds", "1", "--bucket_mb", "1", "--output", "."]
    command = [Path(sys.executable).with_name("pipesync"), "--import", "user_methods", "bench", "step", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [*command, "--methods", "ddp", "of_user"]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    [result] = json.loads((user_folder / "step.json").read_text())["results"]
    assert [one["name"] for one in result["runs"][0]["candidates"]][1:] == ["DDP, 1 MiB", "of_user"]


@pytest.mark.parametrize(("chosen", "period"), [({}, 4), ({"period": 8}, 8), ({"period": "epoch"}, 1)])
def test_whole_periods_of_a_registered_method_are_timed(chosen: dict[str, Any], period: int) -> None:
    """Of one whose settings have a period, in steps."""
    method: Any = SimpleNamespace(
        name="periodic", config_type=lambda **given: SimpleNamespace(**{"period": 4, **given})
    )
    [candidate] = LabEntry(method).bench_candidates("periodic", chosen, ())
    assert candidate.period == period
    method.config_type = SimpleNamespace
    [candidate] = LabEntry(method).bench_candidates("constant", {}, ())
    assert candidate.period == 1
