"""The pictures that a benchmark draws, from what a job of it has measured."""

from __future__ import annotations

import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.results.job import Record
from lightning_pipesync import cli
from lightning_pipesync.lab.bench.benchmark import Command


def command_of(words: str) -> Command:
    """Returns the benchmark of a command with its options, as it is typed; nothing runs."""
    parts = shlex.split(words)
    if "--" in parts:  # what a launcher starts
        parts = parts[parts.index("--") + 1 :]
    if "-m" in parts and parts[parts.index("-m") + 1].startswith("benchmarks."):
        module, *options = parts[parts.index("-m") + 1 :]
        found = [one for one in vars(resolve_name(module)).values() if _is_defined_in(one, module)]
        [benchmark] = found
    elif parts[:2] == ["pipesync", "bench"]:
        benches: Any = cli.SUBCOMMANDS["bench"]
        benchmark, options = resolve_name(benches[parts[2]]), parts[3:]
    else:
        raise ValueError(f"{words!r} is no benchmark.")
    command: Command = cli.parse(benchmark, cli.with_lists(options, benchmark))
    return command


def redraw(record: Record, file: str, path: Path) -> None:
    """Writes the picture that the command of a job calls ``file``."""
    with TemporaryDirectory() as folder:
        replace(command_of(record.command), output=Path(folder)).draw(record.results)
        shutil.copyfile(Path(folder) / file, path)


def _is_defined_in(value: object, module: str) -> bool:
    return isinstance(value, type) and issubclass(value, Command) and value.__module__ == module
