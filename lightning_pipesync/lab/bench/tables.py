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
from statistics import fmean, stdev
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


def number(value: float | None, form: str) -> str:
    """Returns a number in this format; a dash if there is none."""
    return "-" if value is None else format(value, form)


def with_interval(value: float, interval: float | None, form: str = ".2f") -> str:
    """Returns a number in this format, and the half of its confidence interval, if there is one."""
    return format(value, form) if interval is None else f"{value:{form}} ± {interval:.2f}"


def mean_of(values: Sequence[float], form: str = ".2f") -> str:
    """Returns the mean and half of its 95 % confidence interval, if there is one, in this format; nothing of none."""
    if not values:
        return ""
    interval = interval_of(values)
    return f"{fmean(values):{form}}" + ("" if interval is None else f" ± {interval:{form}}")


def interval_of(values: Sequence[float]) -> float | None:
    """Returns half the 95 % confidence interval of the mean (Student's t); None for fewer than two values."""
    from scipy.stats import t

    if len(values) < 2:
        return None
    return float(t.ppf(0.975, len(values) - 1)) * stdev(values) / len(values) ** 0.5


def show(markdown: str) -> None:
    """Prints text with tables; one of which cells would be cut at the terminal's width has long lines instead."""
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    for is_table, lines in groupby(markdown.splitlines(), key=lambda line: line.startswith("|")):
        block = list(lines)
        text = Markdown("\n".join(block))
        with console.capture() as captured:
            console.print(text)
        is_cut = is_table and "\u2026" in captured.get()
        Console(width=_width_of_table(block) if is_cut else None).print(text)


def _width_of_table(lines: Sequence[str]) -> int:
    """Returns the width of a Markdown table as it is printed: with two blanks between columns, and one at each end."""
    columns = zip(*(line[2:-2].split(" | ") for line in lines), strict=True)
    return sum(max(len(cell) for cell in column) + 2 for column in columns) + 2


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
