"""Tables, and the files with the results of a benchmark: all measurements and the environment as JSON, and Markdown."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TypeVar

from lightning_pipesync.core.files import replacing

Row = TypeVar("Row")


def table_of(rows: Iterable[Row], columns: Mapping[str, Callable[[Row], str]]) -> str:
    """Returns a Markdown table with a line for each of ``rows``, from the text of each cell by its column's heading."""
    return table([*columns], [[cell(row) for cell in columns.values()] for row in rows])


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table, with the first column aligned left and the others right."""
    lines = [headings, ["---", *(["---:"] * (len(headings) - 1))], *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def show(markdown: str) -> None:
    """Prints text with tables, whose lines are as long as they need, even if the terminal is narrower."""
    from rich.console import Console
    from rich.markdown import Markdown

    width = Console().width
    for is_table, lines in groupby(markdown.splitlines(), key=lambda line: line.startswith("|")):
        block = list(lines)
        columns = zip(*(line[2:-2].split(" | ") for line in block), strict=True) if is_table else ()
        needed = 2 + sum(2 + max(map(len, column)) for column in columns)
        Console(width=max(width, needed)).print(Markdown("\n".join(block)))


def check_folder(folder: Path) -> None:
    """Raises ValueError if results could not be written to a folder, which may be missing; nothing is created."""
    folder = folder.absolute()
    there = next(one for one in (folder, *folder.parents) if one.exists())
    try:
        with TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ValueError(f"output={str(folder)!r} cannot be written to: {error.strerror}.") from error


def write_results(folder: Path, kind: str, results: dict[str, Any], markdown: str) -> None:
    """Writes ``KIND.json`` and ``KIND.md`` to ``folder``, which is created if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in ((f"{kind}.json", json.dumps(results, indent=1) + "\n"), (f"{kind}.md", markdown)):
        with replacing(folder / name) as temporary:
            temporary.write_text(text)


def environment() -> dict[str, Any]:
    """Returns the time, versions, machine and git commit."""
    packages = ("lightning-pipesync", "torch", "lightning", "pytorch-lightning", "accelerate", "numpy")
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {name: found for name in packages if (found := version_of(name))},
        "machine": platform.machine(),
        "system": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "commit": _git_commit(),
    }


def version_of(package: str) -> str | None:
    """Returns the version of an installed package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """Returns the commit of the source, with a plus if there are changes; None if no repository has it."""

    def git(*words: str) -> str:
        found = subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
        return found.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # the repository around a virtual environment has not
        return git("describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return None
