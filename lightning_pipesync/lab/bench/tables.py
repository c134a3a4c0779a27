"""The results of a benchmark: JSON with all measurements and the environment, and Markdown."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from statistics import stdev
from typing import Any

from scipy.stats import t

from lightning_pipesync.core.files import replacing


def environment() -> dict[str, Any]:
    """Returns the time, versions, machine and git commit."""
    packages = ("lightning-pipesync", "torch", "lightning", "numpy")
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
        "machine": platform.machine(),
        "system": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "commit": _git_commit(),
    }


def write_results(folder: Path, kind: str, results: dict[str, Any], markdown: str) -> None:
    """Writes ``KIND.json`` and ``KIND.md`` to ``folder``, which is created if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in ((f"{kind}.json", json.dumps(results, indent=1) + "\n"), (f"{kind}.md", markdown)):
        with replacing(folder / name) as temporary:
            temporary.write_text(text)


def table(headings: list[str], rows: list[list[str]]) -> str:
    """Returns a Markdown table, with the first column aligned left and the others right."""
    lines = [headings, ["---", *(["---:"] * (len(headings) - 1))], *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def interval_of(values: Sequence[float]) -> float | None:
    """Returns half the 95 % confidence interval of the mean (Student's t); None for fewer than two values."""
    if len(values) < 2:
        return None
    return float(t.ppf(0.975, len(values) - 1)) * stdev(values) / len(values) ** 0.5


def _git_commit() -> str | None:
    """Returns the commit of the source, with a plus if there are changes; None outside a repository."""
    folder = Path(__file__).parent
    try:
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.stdout.strip()
