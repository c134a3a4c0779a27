"""The tables and pictures of ``benchmarks.staleness``, from its results alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

from benchmarks.intervals import number, with_interval
from benchmarks.named_settings import readable
from lightning_pipesync.lab.bench.pictures import COLOURS, colour_and_line, picture
from lightning_pipesync.lab.bench.tables import table

#: By title, labelled curves.
Panels: TypeAlias = dict[str, list[tuple[str, Mapping[str, Any]]]]


_HEADINGS = ("updates", "mean staleness", "halfway", "at the end", "target after")


def as_markdown(result: dict[str, Any]) -> str:
    """Returns all tables."""
    settings, counts = result["settings"], result["counts"]
    of_counts = [
        [readable(text), *(_summary(share[text]) for share in counts.values())] for text in settings["histograms"]
    ]
    policies = [[readable(run["method"]), f"{run['learning_rate']:g}", *_cells(run)] for run in result["policies"]]
    downpour = [
        [f"{run['optimizer']}, {run['n_push']}", f"{run['traffic']:.3f}", *_cells(run)] for run in result["downpour"]
    ]
    return f"""### Staleness of {settings["learners"]} learners

Mean staleness of {settings["gradients"]} gradients, and its 5th and 95th percentile, by the random part of a pass:

{table(["policy", *(f"random part {share}" for share in counts)], of_counts)}
### Error over time with {settings["learners"]} learners

Digits, {len(settings["seeds"])} trainings of {settings["passes"]} mean passes, whose times are exponentially
distributed; batches of {settings["batch_size"]}, without momentum. Errors on the test set in % (mean and 95 %
confidence interval), and when it was {settings["target"]:g} % first, in mean passes.

{table(["policy", "rate", *_HEADINGS], policies)}
### Downpour's traffic and error

n_fetch = n_push, a learning rate of {settings["downpour_rate"]:g}. Traffic: how often a learner sends or fetches as
many values as the weights have, in a pass.

{table(["optimizer, n_push", "traffic", *_HEADINGS], downpour)}"""


def draw_counts(counts: Mapping[str, Mapping[str, Sequence[int]]], path: Path) -> None:
    """Draws a histogram of the staleness: a row of panels for each random part of a pass, a column for each policy."""
    policies = [*next(iter(counts.values()), {})]
    if not policies:
        return
    with picture(path, (2.4 * len(policies), 2.2 * len(counts)), len(counts), len(policies)) as panels:
        for row, (share, of_policies) in zip(panels, counts.items(), strict=True):
            for panel, (policy, of_policy) in zip(row, of_policies.items(), strict=True):
                total = sum(of_policy)
                mean = sum(late * count for late, count in enumerate(of_policy)) / total
                panel.bar(range(len(of_policy)), [100 * n / total for n in of_policy], width=1.0, color=COLOURS[1])
                panel.axvline(mean, color="black", linestyle=":")
                panel.set_title(f"{readable(policy)}, random part {share}\nmean {mean:.1f}", fontsize="x-small")
                panel.set_xlim(-0.6, max(3, len(of_policy) - 0.4))
        panels[0, 0].figure.supxlabel("staleness in updates")
        panels[0, 0].figure.supylabel("% of the gradients")


def draw_errors(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws the test error over simulated time, a panel for each learning rate, a curve for each policy."""
    panels_of: Panels = {f"learning rate {run['learning_rate']:g}": [] for run in runs}
    for run in runs:
        panels_of[f"learning rate {run['learning_rate']:g}"].append((readable(run["method"]), run))
    _draw_panels(panels_of, path, 2)


def draw_downpour(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws the test error over simulated time, a panel for each optimizer of the servers, a curve for each n_push."""
    panels_of: Panels = {f"servers with {run['optimizer']}": [] for run in runs}
    for run in runs:
        panels_of[f"servers with {run['optimizer']}"].append((f"n_push = {run['n_push']}", run))
    _draw_panels(panels_of, path, 5)


def _draw_panels(panels_of: Panels, path: Path, legend_columns: int) -> None:
    if not panels_of:
        return
    size, below = (4.5 * len(panels_of), 5.0), {"legend": "below", "legend_columns": legend_columns}
    shared: Any = {"sharey": True, **below}
    with picture(path, size, 1, len(panels_of), **shared) as panels:
        for panel, (title, curves) in zip(panels[0], panels_of.items(), strict=True):
            for number, (label, run) in enumerate(curves):
                _draw_curve(panel, run, label, colour_and_line(number))
            panel.set(xlabel="time in mean passes of a learner", title=title, yscale="log")
            panel.grid(alpha=0.3, which="both")
        panels[0, 0].set_ylabel("test error %")


def _draw_curve(panel: Any, run: Mapping[str, Any], label: str, look: Mapping[str, Any]) -> None:
    """Draws the mean, and, lighter, its confidence interval."""
    panel.plot(run["times"], run["errors"], label=label, **look)
    pairs = [*zip(run["errors"], run["intervals"], strict=True)]
    low, high = ([max(0.1, error + sign * interval) for error, interval in pairs] for sign in (-1, 1))
    panel.set_ylim(1, 100)
    panel.fill_between(run["times"], low, high, color=look["color"], alpha=0.12, linewidth=0)


def _cells(run: dict[str, Any]) -> list[str]:
    half, reached = (len(run["times"]) - 1) // 2, [time for time in run["reached"] if time is not None]
    of_all = len(run["final"])
    target = number(fmean(reached) if reached else None, ".0f")
    note = "" if len(reached) in (0, of_all) else f" ({len(reached)} of {of_all})"
    diverged = f" ({run['diverged']} diverged)" if run["diverged"] else ""
    return [
        f"{run['updates']:.0f}",
        f"{run['staleness']:.1f}",
        with_interval(run["errors"][half], run["intervals"][half] or None),
        with_interval(run["errors"][-1], run["intervals"][-1] or None) + diverged,
        target + note,
    ]


def _summary(counts: Sequence[int]) -> str:
    total = sum(counts)

    def percentile(share: float) -> int:
        return next(late for late in range(len(counts)) if sum(counts[: late + 1]) >= share * total)

    mean = sum(late * count for late, count in enumerate(counts)) / total
    return f"{mean:.1f} ({percentile(0.05)} to {percentile(0.95)})"
