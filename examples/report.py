"""Progress bars, and the table, picture and results file of several runs."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev

import matplotlib
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter
from recording import Run
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from lightning_pipesync.lab.bench.pictures import COLOURS

matplotlib.use("Agg")  # without a display

# Distinguishable in black and white.
LINE_STYLES = ["-", "--", "-.", ":"]


@dataclass
class Row:
    """A row of the table: the runs of one name, averaged over their seeds.

    Attributes:
        name: of the runs.
        accuracy: on the test set.
        accuracy_stdev: its standard deviation over the seeds; 0 with a single seed.
        steps: of each run.
        lssr: share of the steps that stayed local.
        mib_sent: by rank 0.
        mib_for_validation: the part of ``mib_sent`` that averaged the replicas for validations.
        fewer_bytes: DDP's ``mib_sent`` divided by this row's.
        promised: 1 / (1 - LSSR), which the paper expects for ``fewer_bytes``.
        seconds: of training and validation.
    """

    name: str
    accuracy: float
    accuracy_stdev: float
    steps: int
    lssr: float
    mib_sent: float
    mib_for_validation: float
    fewer_bytes: float | None
    promised: float | None
    seconds: float


def summarize(runs: Sequence[Run]) -> list[Row]:
    """Returns one row for each name, in the order of the runs."""
    ddp_mib = fmean(run.mib_sent[-1] for run in runs if run.delta is None)
    rows = []
    for name, group in by_name(runs).items():
        accuracies = [run.accuracy for run in group]
        lssr = fmean(run.lssr for run in group)
        mib = fmean(run.mib_sent[-1] for run in group)
        rows.append(
            Row(
                name=name,
                accuracy=fmean(accuracies),
                accuracy_stdev=stdev(accuracies) if len(group) > 1 else 0.0,
                steps=group[0].steps,
                lssr=lssr,
                mib_sent=mib,
                mib_for_validation=fmean(run.mib_for_validation for run in group),
                fewer_bytes=ddp_mib / mib if ddp_mib else None,  # a single process sends nothing
                promised=1 / (1 - lssr) if lssr < 1 else None,
                seconds=fmean(run.seconds[-1] for run in group),
            )
        )
    return rows


def by_name(runs: Sequence[Run]) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.name, []).append(run)
    return groups


def progress_bars() -> Progress:
    """Returns bars with a ``status`` field, not started yet."""
    return Progress(
        TextColumn("{task.description:<14}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("epochs"),
        TextColumn("{task.fields[status]}"),
    )


def print_table(runs: Sequence[Run], world_size: int) -> None:
    seeds = len({run.seed for run in runs})
    table = Table(
        title=f"Processes: {world_size}, seeds: {seeds}",
        caption=(
            "Test accuracy: mean of a run's last five epochs, then of the seeds, ± standard deviation over the seeds; "
            "one image is 0.17. LSSR: share of the steps that stayed local. MiB sent: by rank 0. For SelSync the "
            "strategy counts them, including the initial weights, the flags and the averages before validations, which "
            "1 / (1 - LSSR) does not include. For DDP it is what a ring all-reduce sends: 2 (N - 1) / N of the "
            "gradient at each step. Seconds: with validation; within one machine the network is not slow."
        ),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),  # to fit into 80 columns
    )
    table.add_column("run", no_wrap=True)
    for heading in ("test\naccuracy %", "steps", "LSSR", "MiB\nsent", "fewer\nbytes", "1 / (1\n- LSSR)", "seconds"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in summarize(runs):
        table.add_row(
            row.name,
            f"{100 * row.accuracy:.2f}" + (f" ± {100 * row.accuracy_stdev:.2f}" if seeds > 1 else ""),
            str(row.steps),
            f"{row.lssr:.3f}",
            f"{row.mib_sent:.1f}",
            times(row.fewer_bytes),
            times(row.promised),
            f"{row.seconds:.1f}",
        )
    Console().print(table)


def times(factor: float | None) -> str:
    return "" if factor is None else f"{factor:.1f} x"


def write_json(runs: Sequence[Run], options: argparse.Namespace, path: Path) -> Path:
    """Writes the options, the rows of the table, and the runs with all that was recorded."""
    results = {
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()},
        "table": [asdict(row) for row in summarize(runs)],
        "runs": [asdict(run) for run in runs],
    }
    path.write_text(json.dumps(results, indent=1))
    return path


def draw_picture(runs: Sequence[Run], path: Path) -> Path:
    """Draws accuracy over time and over traffic, and the gradient change of a run with the middle delta."""
    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25})
    plt.rcParams.update({"axes.titlelocation": "left", "legend.frameon": False})
    panels = [["time", "traffic"], ["change", "change"]]
    figure, axes = plt.subplot_mosaic(panels, figsize=(11, 7.5), layout="constrained")

    draw_accuracy(axes["time"], runs, lambda run: run.seconds)
    axes["time"].set(title="Accuracy over time", xlabel="seconds of training and validation", ylabel="test accuracy")
    draw_accuracy(axes["traffic"], runs, lambda run: run.mib_sent)
    axes["traffic"].set(title="Accuracy over traffic", xlabel="MiB sent by rank 0", xscale="log")
    axes["traffic"].xaxis.set_major_formatter("{x:g}")
    axes["traffic"].sharey(axes["time"])
    axes["time"].set_ylim(min(0.9, *(run.accuracy - 0.05 for run in runs)), 1.0)
    axes["time"].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes["time"].legend(loc="lower right", title="mean of the seeds" if len({run.seed for run in runs}) > 1 else None)

    deltas = sorted({run.delta for run in runs if run.delta is not None})
    draw_gradient_change(axes["change"], next(run for run in runs if run.delta == deltas[len(deltas) // 2]))
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def draw_accuracy(axes: Axes, runs: Sequence[Run], x: Callable[[Run], list[float]]) -> None:
    """Draws a line for each name, the mean over its seeds, and a faint line for each seed."""
    for i, (name, group) in enumerate(by_name(runs).items()):
        color, style = COLOURS[i % len(COLOURS)], LINE_STYLES[i % len(LINE_STYLES)]
        if len(group) > 1:
            for run in group:
                axes.plot(x(run), run.accuracies, color=color, alpha=0.25, linewidth=0.8)
        mean_x = [fmean(values) for values in zip(*map(x, group), strict=True)]
        mean_accuracy = [fmean(values) for values in zip(*(run.accuracies for run in group), strict=True)]
        axes.plot(mean_x, mean_accuracy, style, color=color, label=name, linewidth=2, marker="o", markersize=3)


def draw_gradient_change(axes: Axes, run: Run) -> None:
    """Draws the relative gradient change of every step, with delta and the synchronized steps."""
    changes = [math.nan if change is None else change for change in run.relative_changes]
    steps = [step for step, synchronized in enumerate(run.synchronized) if synchronized]
    share = f"synchronized: {len(steps)} of {run.steps} steps"
    axes.plot(changes, color="#888888", linewidth=0.8, label="relative gradient change (the largest of all ranks)")
    axes.plot(steps, [changes[step] for step in steps], "o", color=COLOURS[2], markersize=4, label=share)
    axes.axhline(run.delta, color=COLOURS[1], linestyle="--", label=f"δ = {run.delta:g}")
    axes.set(xlabel="step", ylabel="relative gradient change", yscale="log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_title(f"When {run.name} synchronizes (seed {run.seed})", pad=24)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0, handletextpad=0.5)
