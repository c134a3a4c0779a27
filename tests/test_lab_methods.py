"""A method that a user registers is benchmarked and planned, with no line outside its folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
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
from lightning_pipesync.methods.laboratory import Prediction
from tests.conformance.methods import METHODS  # which registers the example
from tests.harness import launch

assert "averaging" in METHODS

ROOT = Path(__file__).parents[1]


def test_the_step_of_a_registered_method_is_timed(tmp_path: Path) -> None:
    """In other processes, which have to find it."""
    chosen = ["--methods", "ddp", "averaging", "averaging:bucket_mb=0.5"]
    options = ["--scale", "0.001", "--steps", "1", "--rounds", "1", "--bucket_mb", "1", *chosen]
    assert main(["bench", "step", *options, "--output", str(tmp_path)]) == 0
    [result] = json.loads((tmp_path / "step.json").read_text())["results"]
    candidates = {one["name"]: one for one in result["runs"][0]["candidates"]}
    assert list(candidates)[1:] == ["DDP, 1 MiB", "Averaging", "Averaging (bucket_mb=0.5)"]
    assert all(one["seconds"][0] > 0 for one in candidates.values())
    assert candidates["Averaging"]["limit"] > candidates["DDP, 1 MiB"]["limit"], "nothing is hidden"


@pytest.mark.usefixtures("forked_ranks")
def test_a_registered_method_trains_a_task_as_ddp_does(tmp_path: Path) -> None:
    chosen = ["--methods", "ddp", "averaging"]
    options = ["--epochs", "1", "--evaluations", "2", "--steps", "8", *chosen]
    assert main(["bench", "converge", *options, "--output", str(tmp_path)]) == 0
    [result] = json.loads((tmp_path / "converge.json").read_text())["results"]
    ddp, averaging = ([point["quality"] for point in run["points"]] for run in result["runs"])
    assert averaging == ddp


def plan() -> dict[str, Any]:
    """Measures, predicts, and runs what is predicted of the method beside DDP."""
    settings = PlanSettings("tests.test_plan:small_model", 1.0, 1.0, steps=1, rounds=1)
    model = settings.build()
    result = plan_for(measure_work(model), model.module, asdict(settings), lambda _: None)
    predictions = [one for one in predict(*of_result(result)[:2]) if one.method in ("ddp", "averaging")]
    return {**result, "measured": run_in_turns(predictions, settings, lambda _: None)}


def test_a_registered_method_is_planned() -> None:
    for result in launch(plan, 2):
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


def run_command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in a folder with a user's module, which is not on Python's path."""
    (folder / "user_methods.py").write_text(OF_USER)
    (folder / "without_methods.py").write_text("")
    return subprocess.run(
        [Path(sys.executable).with_name("pipesync"), *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--import"], "--import needs the name of a module."),
        (["--import", "not_there", "plan"], "--import not_there: ModuleNotFoundError: No module named 'not_there'."),
        (["--import=without_methods", "plan"], "--import without_methods registers no method"),
    ],
)
def test_a_module_without_methods_is_refused(words: list[str], said: str, tmp_path: Path) -> None:
    ended = run_command(tmp_path, *words)
    assert ended.returncode == 2
    assert f"pipesync: error: {said}" in ended.stderr


def test_the_step_of_a_method_in_a_module_of_the_user_is_timed(tmp_path: Path) -> None:
    options = ["--scale", "0.001", "--steps", "1", "--rounds", "1", "--bucket_mb", "1", "--output", "."]
    ended = run_command(tmp_path, "--import", "user_methods", "bench", "step", *options, "--methods", "ddp", "of_user")
    assert ended.returncode == 0, ended.stderr
    [result] = json.loads((tmp_path / "step.json").read_text())["results"]
    assert [one["name"] for one in result["runs"][0]["candidates"]][1:] == ["DDP, 1 MiB", "OfUser"]


def test_a_method_in_a_module_of_the_user_is_planned(tmp_path: Path) -> None:
    options = ["--model", "tests.test_plan:small_model", "--steps", "1", "--rounds", "0", "--output", "."]
    ended = run_command(tmp_path, "--import", "user_methods", "plan", *options)
    assert ended.returncode == 0, ended.stderr
    assert "      of_user" in (tmp_path / "plan.md").read_text()
