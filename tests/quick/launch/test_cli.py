"""The command: its help, subcommands that do not exist, and packages that are not installed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import lightning_pipesync
from lightning_pipesync import PlanCallback
from lightning_pipesync.cli import emulates, main
from lightning_pipesync.lab.bench import benchmark


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"pipesync {lightning_pipesync.__version__}\n"


def test_modules_of_the_user_s_folder_do_not_hide_those_of_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "yaml.py").write_text("raise RuntimeError('of the user')")
    (tmp_path / "of_user.py").write_text("raise ImportError('found')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.delitem(sys.modules, "yaml", raising=False)
    with pytest.raises(SystemExit, match="0"):
        main(["plan", "--help"])
    assert main(["--import", "of_user", "plan"]) == 2
    assert "--import of_user: ImportError: found" in capsys.readouterr().err
    assert main(["--import", "of_usr", "plan"]) == 2
    assert "No module named 'of_usr'. Did you mean 'of_user'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["pln"], "There is no subcommand 'pln'. Did you mean pipesync plan? There are launch, lighthouse, plan, "),
        (["bench", "stp"], "There is no subcommand 'stp'. Did you mean pipesync bench step? There are collectives, "),
        (["bench", "xyz"], "There is no subcommand 'xyz'. There are collectives, "),
    ],
)
def test_a_subcommand_that_is_meant(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert f"pipesync: error: {said}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("netlab --hosts 2 -- true", True),
        ("--import mine plan --rate 1gbit", True),
        ("--import=mine bench step --rate=1gbit", True),
        ("plan --from plan.json --rate 25gbit", False),
        ("launch --replicas 4 train.py --rate 0.1", False),
        ("bench step -- train.py --rate 0.1", False),
        ("plan --hosts 2", False),
        ("", False),
    ],
)
def test_only_what_emulates_a_network_leaves_that_of_the_machine(command: str, expected: bool) -> None:
    """An option of the user's own script may have any name."""
    assert emulates(command.split()) == expected


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("steps: 3\nhots: 4\n", ", line 2: 'hots' is not an option of pipesync plan. Did you mean 'hosts'?"),
        ("hosts: 4\n rounds: 1\n", " is no YAML file: line 2: mapping values are not allowed here."),
        ("- hosts\n", " must hold names and values"),
        ("rounds: 1\nhosts: many\n", ", line 2: hosts has a wrong value: see pipesync plan --help."),
        ("null", " must hold names and values, as in 'name: value'; it holds None."),
    ],
)
def test_a_wrong_line_of_a_configuration_file_is_told(
    content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(content)
    assert main(["plan", "--config", str(file)]) == 2
    assert capsys.readouterr().err.startswith(f"pipesync: error: {file}{said}")


COMMANDS = ("", "plan", "netlab", "launch", "lighthouse", "bench", "bench step")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_no_types_of_python(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit, match="0"):
        main([*command.split(), "--help"])
    said = capsys.readouterr().out
    assert "--config" in said
    for word in ("ITEM", "<class", "NoneType", "type:", "null", "Sequence", "+ ["):
        assert word not in said
    if command == "bench step":
        assert "--hosts HOSTS ..." in said
        assert "(default: 0.5 2 25)" in said
    if command == "netlab":
        assert "(3:50%)" in said
        assert "(required)" in said


@pytest.mark.parametrize(
    ("missing", "command", "said", "extra"),
    [
        ("accelerate", "launch train.py", "launch needs Accelerate", "accelerate"),
        ("torchft", "launch --replicas 2 train.py", "launch needs torchft (Linux on x86-64)", "torchft"),
        ("torchft", "launch --replicas=2 a.py --help", "launch needs torchft (Linux on x86-64)", "torchft"),
        ("torchft", "lighthouse", "lighthouse needs torchft (Linux on x86-64)", "torchft"),
        ("rich", "plan", "plan needs rich", "plan"),
        ("rich matplotlib", "bench step", "bench step needs matplotlib, rich", "bench"),
        ("pyroute2", "netlab --hosts 2 -- true", "netlab needs pyroute2", "netlab"),
        ("pyroute2", "plan --rate 1gbit", "plan needs pyroute2", "plan"),
        ("transformers", "plan --model bert-base", "plan with bert-base needs transformers", "transformers"),
        ("transformers", "bench step --model=resnet50", "bench step with resnet50 needs transformers", "transformers"),
    ],
)
def test_a_package_that_is_missing_is_told_before_anything_is_measured(
    missing: str,
    command: str,
    said: str,
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in missing.split():
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]  # as if it was not there

    def run(*_: Any) -> None:
        pytest.fail("it began to measure")

    monkeypatch.setattr(benchmark, "run_on", run)
    assert main(command.split()) == 2
    assert capsys.readouterr().err == f'pipesync: error: pipesync {said}: pip install "lightning-pipesync[{extra}]"\n'


def test_a_plan_in_a_run_needs_matplotlib_when_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # type: ignore[arg-type]
    with pytest.raises(ModuleNotFoundError, match="PlanCallback needs matplotlib: pip install"):
        PlanCallback()
