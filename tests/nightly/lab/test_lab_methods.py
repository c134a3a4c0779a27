"""A method that a user registers is benchmarked and planned, with no line outside its folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_pipesync.cli import main
from lightning_pipesync.lab.plan.report import to_copy
from lightning_pipesync.lab.plan.verdict import verdict_of
from lightning_pipesync.lab.predictions.entry import Prediction
from lightning_pipesync.training.registry import METHODS
from tests.conformance import methods
from tests.support.bench_runs import result_of
from tests.support.commands import ROOT

assert "averaging" in methods.METHODS, "the import registers it"


@pytest.mark.usefixtures("forked_ranks")
def test_a_registered_method_is_timed_and_trains_a_task_as_ddp_does(tmp_path: Path) -> None:
    options = "--scale 0.001 --steps 1 --rounds 1 --bucket_mb 1 --methods ddp averaging averaging:bucket_mb=0.5"
    result = result_of("bench step", options, tmp_path)
    candidates = {one["name"]: one for one in result["runs"][0]["candidates"]}
    assert list(candidates)[1:] == ["DDP, 1 MiB", "averaging", "averaging (bucket_mb=0.5)"]
    assert all(one["seconds"][0] > 0 for one in candidates.values())
    assert candidates["averaging"]["limit"] > candidates["DDP, 1 MiB"]["limit"], "nothing is hidden"
    result = result_of("converge", "--epochs 1 --evaluations 2 --steps 8 --methods ddp averaging", tmp_path)
    ddp, averaging = ([point["quality"] for point in run["points"]] for run in result["runs"])
    assert averaging == ddp


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


def test_a_method_in_a_module_of_the_user_is_timed_and_planned(user_folder: Path) -> None:
    """By the installed command, whose ranks are processes of their own that have to find the module."""
    command = [Path(sys.executable).with_name("pipesync"), "--import", "user_methods"]
    shared = ["--steps", "1", "--rounds", "1", "--output", "."]
    step = ["bench", "step", "--scale", "0.001", "--bucket_mb", "1", "--methods", "ddp", "of_user"]
    for words in (step, ["plan", "--model", "tests.quick.lab.test_plan:small_model"]):
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        ended = subprocess.run(
            [*command, *words, *shared], env=environment, capture_output=True, text=True, timeout=600
        )
        assert ended.returncode == 0, ended.stderr
    [result] = json.loads((user_folder / "step.json").read_text())["results"]
    assert [one["name"] for one in result["runs"][0]["candidates"]][1:] == ["DDP, 1 MiB", "of_user"]
    assert "      of_user" in (user_folder / "plan.md").read_text()
    [result] = json.loads((user_folder / "plan.json").read_text())["results"]
    run = {name.partition(":")[0] for name, measured in result["measured"].items() if "seconds" in measured}
    assert {"ddp", "dear"} < run, result["measured"]
