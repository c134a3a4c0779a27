"""The commands in the README, the docs and benchmarks/jobs.yaml: their parsers take all options. None is run."""

from __future__ import annotations

import runpy
import shlex
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

from benchmarks.results import read_jobs
from lightning_pipesync import LocalSGD, cli
from lightning_pipesync.accelerate import launch as accelerate_launch
from lightning_pipesync.lab.bench.benchmark import Command
from lightning_pipesync.lab.netlab import job, network
from lightning_pipesync.training.registry import METHODS
from tests.support.commands import ROOT
from tests.support.docs_pages import PAGES, blocks_of

#: Bash writes the words of each command that it does not find, which is every one, instead of running it.
RECORD = 'command_not_found_handle() { printf "%s\\0" "$@" "" >> "$RECORDED"; }\n'


def commands_in(block: str, folder: Path) -> list[list[str]]:
    """Returns the words of each command of a block, as bash expands them."""
    recorded = folder / "recorded"
    recorded.touch()
    variables = {"PATH": "/nonexistent", "RECORDED": str(recorded), "RANK": "0"}
    ended = subprocess.run(
        ["/bin/bash", "-c", RECORD + block], env=variables, capture_output=True, text=True, cwd=folder
    )
    assert (ended.returncode, ended.stderr) == (0, ""), block
    return [words.split("\0") for words in recorded.read_text().split("\0\0")[:-1]]


def arguments_of(words: list[str]) -> tuple[str, list[str]] | None:
    """Returns the program and the arguments of a command of this package, which a launcher may start; or None."""
    words = [word for word in words if word != "..."]  # for what the reader knows
    if words[0] == "pipesync":
        return "pipesync", words[1:]
    if "-m" in words:
        module, *arguments = words[words.index("-m") + 1 :]
        if module == "lightning_pipesync":
            return "pipesync", arguments
        if module.startswith("benchmarks."):
            return module, arguments
    return None


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command would do after its options are read, it does not."""
    monkeypatch.setattr(Command, "run", lambda self: None)
    for command in (cli.Plan, cli.Launch, cli.Lighthouse):
        monkeypatch.setattr(command, "run", lambda self: None)
    monkeypatch.setattr(network.Network, "__enter__", lambda self: self)
    monkeypatch.setattr(network.Network, "__exit__", lambda self, *error: None)
    monkeypatch.setattr(job, "run_job", lambda *args, **options: 0)
    monkeypatch.setattr(accelerate_launch, "launch_command", lambda parsed: None)
    # A method of the reader's.
    monkeypatch.setitem(sys.modules, "my_package.my_method", ModuleType("my_package.my_method"))
    monkeypatch.setitem(METHODS, "my_method", LocalSGD)
    monkeypatch.chdir(ROOT)


def run(program: str, arguments: list[str]) -> object:
    """Returns the exit status of a program."""
    if program == "pipesync":
        return cli.main(arguments)
    read = ArgumentParser.parse_args

    def only_read(parser: ArgumentParser, *args: Any, **options: Any) -> Any:
        read(parser, *args, **options)
        raise SystemExit(0)

    started = mock.patch("sys.argv", [program, *arguments])
    with started, mock.patch.object(ArgumentParser, "parse_args", only_read), pytest.raises(SystemExit) as ended:
        runpy.run_module(program, run_name="__main__")
    return ended.value.code


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")  # a benchmark that was imported before
@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_have_options_that_exist(page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, (_, block) in enumerate(blocks_of(page, "bash")):
        folder = tmp_path / str(number)
        folder.mkdir()
        for words in commands_in(block, folder):
            if command := arguments_of(words):
                assert run(*command) == 0, f"{' '.join(words)}\n{capsys.readouterr().err}"


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.usefixtures("nothing_runs")
def test_jobs_have_options_that_exist() -> None:
    for one in read_jobs():
        words = shlex.split(one.command)
        if program := arguments_of(words[words.index("--") + 1 :] if "--" in words else words):
            assert run(*program) == 0, one.name


def test_a_wrong_option_is_found(nothing_runs: None, tmp_path: Path) -> None:
    block = "M='--hosts 2'\npipesync bench step $M --methods ddp,dear --rat 1gbit"
    [words] = commands_in(block, tmp_path)
    assert words == ["pipesync", "bench", "step", "--hosts", "2", "--methods", "ddp,dear", "--rat", "1gbit"]
    with pytest.raises(SystemExit):
        run(*(arguments_of(words) or ("", [])))
