"""Benchmarks, run in this process by the words of a user."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks import command
from lightning_pipesync.cli import main
from tests.support.commands import ROOT

#: Where the class of each command in benchmarks/ is, by its name; the other commands are those of ``pipesync``.
PLACES = {
    path.stem: places[-1]
    for path in sorted((ROOT / "benchmarks").glob("*.py"))
    if (places := re.findall(r'command\.main\("([\w.]+:\w+)"\)', path.read_text()))
}


def run_command(name: str, options: str) -> int:
    """Runs ``pipesync NAME OPTIONS``, or ``python -m benchmarks.NAME OPTIONS``; returns its exit status."""
    if name in PLACES:
        return command.main(PLACES[name], options.split())
    return main([*name.split(), *options.split()])


def result_of(name: str, options: str, folder: Path) -> dict[str, Any]:
    """Runs a command, which has to succeed, with ``folder`` as its output; returns the only result there."""
    assert run_command(name, f"{options} --output {folder}") == 0
    [result] = json.loads((folder / f"{name.split()[-1]}.json").read_text())["results"]
    return dict(result)


def assert_pictures(folder: Path, *names: str) -> None:
    for name in names:
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG"), name
