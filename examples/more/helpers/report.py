"""The table, the picture and the results file of several trainings."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from helpers.recording import Run
from matplotlib.ticker import PercentFormatter
from rich import box
from rich.console import Console
from rich.table import Table

from lightning_pipesync.lab.bench.pictures import looks_of, picture


@dataclass
class Row:
    """A row of the table: the runs of one strategy, averaged over their seeds.

    Attributes:
        strategy: of the runs.
        accuracy: on the test set.
        difference: to the accuracy with the first strategy.
        steps: of each run.
        seconds: of training and validation.
        times_as_fast: as the first strategy.
        mib_sent: by rank 0, in steps.
    """

    strategy: str
    accuracy: float
    difference: float
    steps: int
    seconds: float
    times_as_fast: float
    mib_sent: float


def summarize(runs: Sequence[Run]) -> list[Row]:
    """Returns one row for each strategy, in the order of the runs."""
    rows: list[Row] = []
    for strategy, group in by_strategy(runs).items():
        seconds, accuracy = fmean(run.seconds[-1] for run in group), fmean(run.accuracy for run in group)
        rows.append(
            Row(
                strategy=strategy,
                accuracy=accuracy,
                difference=accuracy - rows[0].accuracy if rows else 0.0,
                steps=group[0].steps,
                seconds=seconds,
                times_as_fast=(rows[0].seconds if rows else seconds) / seconds,
                mib_sent=fmean(run.mib_sent for run in group),
            )
        )
    return rows


def by_strategy(runs: Sequence[Run]) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.strategy, []).append(run)
    return groups


def print_table(runs: Sequence[Run], title: str) -> None:
    rows = summarize(runs)
    table = Table(
        title=title,
        caption=(
            "Mean of the seeds; test accuracy: of a run's last three epochs (one image is 0.17); seconds: with "
            "validation; MiB sent: by rank 0 in steps, for DDP what a ring all-reduce sends at least."
        ),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("strategy", no_wrap=True)
    first = rows[0].strategy
    compared = f"more than\n{first}", "steps", "seconds", f"times as\nfast as {first}"
    for heading in ("test\naccuracy %", *compared, "MiB\nsent"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.strategy,
            f"{100 * row.accuracy:.2f}",
            f"{100 * row.difference:+.2f}",
            str(row.steps),
            f"{row.seconds:.1f}",
            f"{row.times_as_fast:.2f}",
            f"{row.mib_sent:.0f}",
        )
    Console().print(table)


def write_json(runs: Sequence[Run], title: str, options: argparse.Namespace, path: Path) -> None:
    """Writes the options but for the folder, the rows of the table, and the runs with all that was recorded."""
    results = {
        "title": title,
        "settings": {name: value for name, value in vars(options).items() if name != "output"},
        "table": [asdict(row) for row in summarize(runs)],
        "runs": [asdict(run) for run in runs],
    }
    path.write_text(json.dumps({"kind": "digits", "results": [results]}, indent=1))


def draw_picture(runs: Sequence[Run], title: str, path: Path) -> None:
    """Draws accuracy over time, and how long each strategy took."""
    groups = by_strategy(runs)
    looks = looks_of(groups)
    with picture(path, (10, 3.8), columns=2) as [[curves, bars]]:
        for strategy, group in groups.items():
            seconds = [fmean(values) for values in zip(*(run.seconds for run in group), strict=True)]
            accuracies = [fmean(values) for values in zip(*(run.accuracies for run in group), strict=True)]
            curves.plot(seconds, accuracies, label=strategy, markersize=4, **looks[strategy])
        curves.set(title=f"Handwritten digits, {title}", xlabel="seconds of training", ylim=(0.5, 1.0))
        curves.set_ylabel("new images that are recognized")
        curves.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        curves.legend(loc="lower right")
        rows = summarize(runs)
        names = [row.strategy for row in rows]
        drawn = bars.barh(names, [row.seconds for row in rows], color=[looks[name]["color"] for name in names])
        bars.bar_label(drawn, [_in_words(row, rows[0]) for row in rows], padding=4, fontsize="small")
        bars.invert_yaxis()
        bars.set(title=f"Seconds for the same {rows[0].steps} steps", xlim=(0, 1.95 * max(row.seconds for row in rows)))
        for panel in (curves, bars):
            panel.spines[["top", "right"]].set_visible(False)


def _in_words(row: Row, first: Row) -> str:
    if row is first:
        return f"{row.seconds:.0f} s, {row.mib_sent:.0f} MiB sent"
    points = f"{100 * row.difference:+.1f} points" if row.difference else "the same accuracy"
    return f"{row.times_as_fast:.1f} times as fast, {row.mib_sent / first.mib_sent:.0%} of the bytes, {points}"
