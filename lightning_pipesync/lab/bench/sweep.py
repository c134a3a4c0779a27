"""Runs a benchmark for several numbers of hosts, and shows its progress and its results."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_pipesync.lab.bench.job import Hosts, launched, run_job
from lightning_pipesync.lab.bench.tables import environment, write_results
from lightning_pipesync.lab.bench.worker import Measure


def make_hosts(counts: list[int], rate: str | None, racks: int, uplink: str | None) -> list[Hosts]:
    """Returns the hosts to run on, for each number of hosts.

    Raises:
        ValueError: there are fewer than 2 hosts, or settings of a network without a rate.
    """
    if rate is None and (racks != 1 or uplink is not None):
        raise ValueError(f"racks={racks} and uplink={uplink!r} describe an emulated network: give its rate, too.")
    for count in counts:
        if count < 2:
            raise ValueError(f"hosts={counts!r}: a benchmark of communication needs at least 2.")
    return [Hosts(count, rate, racks, uplink) for count in counts]


def run(measure: Measure, settings: Any, all_hosts: list[Hosts], num_measurements: int) -> list[dict[str, Any]]:
    """Runs the benchmark for each number of hosts, with a progress bar.

    Returns:
        The results with their rate and environment; empty on the ranks of a launcher other than the first.
    """
    results = []
    for hosts in all_hosts[:1] if launched() else all_hosts:
        with progress_bar("" if launched() else f"{hosts.count} hosts", num_measurements) as advance:
            result = run_job(measure, settings, hosts, advance)
        if result is not None:
            rate = None if launched() else hosts.rate
            results.append({**result, "rate": rate, "environment": environment()})
    return results


def finish(kind: str, results: list[dict[str, Any]], output: Path, markdown: str) -> None:
    """Writes the results to the folder ``output``, and prints the tables."""
    write_results(output, kind, {"kind": kind, "results": results}, markdown)
    show(markdown)
    Console().print(f"Results and pictures: {output}")


def show(markdown: str) -> None:
    """Prints text with tables."""
    Console().print(Markdown(markdown))


@contextmanager
def progress_bar(name: str, total: int) -> Iterator[Callable[[str], object]]:
    """Shows a progress bar on the first rank; yields a function to call with a description after each part."""
    columns = (
        TextColumn(name),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    on_first_rank = os.environ.get("RANK", "0") == "0"
    with Progress(*columns, console=Console(stderr=True), disable=not on_first_rank) as progress:
        task = progress.add_task("", total=total)
        yield lambda text: progress.update(task, advance=1, description=text)
