"""Table and picture of trainings to a target (SelSync, Table I)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_pipesync.bench.named_settings import readable
from lightning_pipesync.bench.results import table

Point = dict[str, float]


@dataclass(frozen=True)
class Row:
    """What the trainings with one method did.

    Attributes:
        method: with its settings.
        lssr: share of the steps that stayed local, the mean over the seeds; None if that means nothing.
        quality: the best of each training, the mean over the seeds.
        quality_stdev: its standard deviation over the seeds; 0 if there is but one.
        difference: of the quality to the baseline's, positive if better.
        num_reached: how many of the trainings have reached the target.
        steps: to the target, the median over the seeds; None if not all of them have reached it.
        seconds: likewise.
        mib: that rank 0 has sent until then, likewise.
        speedup: the baseline's seconds over these.
    """

    method: str
    lssr: float | None
    quality: float
    quality_stdev: float
    difference: float
    num_reached: int
    steps: float | None
    seconds: float | None
    mib: float | None
    speedup: float | None


def rows_of(result: dict[str, Any]) -> list[Row]:
    """Returns a row for each method; the baseline is the first DDP, or the first method if there is none."""
    by_method = _by_method(result)
    baseline = next((name for name in by_method if name.startswith("ddp")), next(iter(by_method)))
    sign = 1 if result["higher_is_better"] else -1
    quality = {name: [_best(run["points"], sign) for run in runs] for name, runs in by_method.items()}
    reached = {
        name: [point for run in runs if (point := _reached(run["points"], result["target"], sign))]
        for name, runs in by_method.items()
    }

    def to_target(name: str, what: str) -> float | None:
        points = reached[name]
        return median(point[what] for point in points) if len(points) == len(by_method[name]) else None

    rows = []
    for name, runs in by_method.items():
        lssr = [run["lssr"] for run in runs if run["lssr"] is not None]
        seconds, baseline_seconds = to_target(name, "seconds"), to_target(baseline, "seconds")
        rows.append(
            Row(
                method=name,
                lssr=fmean(lssr) if lssr else None,
                quality=fmean(quality[name]),
                quality_stdev=stdev(quality[name]) if len(runs) > 1 else 0.0,
                difference=sign * (fmean(quality[name]) - fmean(quality[baseline])) + 0.0,  # no -0.0
                num_reached=len(reached[name]),
                steps=to_target(name, "steps"),
                seconds=seconds,
                mib=to_target(name, "mib"),
                speedup=baseline_seconds / seconds if baseline_seconds and seconds else None,
            )
        )
    return rows


def as_markdown(results: list[dict[str, Any]]) -> str:
    """Returns a table for each number of hosts."""
    parts = []
    for result in results:
        settings, seeds = result["settings"], len(result["settings"]["seeds"])
        network = f", {result['rate']}" if result.get("rate") else ""
        skew = f", {labels} labels on each" if (labels := settings["labels_per_worker"]) else ""
        better = "at least" if result["higher_is_better"] else "at most"
        parts.append(f"""### {settings["task"]} on {result["world_size"]} hosts{network}{skew}

Steps, seconds and MiB (sent by rank 0) until the {result["metric"]} was {better} {result["target"]:g}: medians of
{seeds} trainings, and how many of them got there; it was measured {settings["evaluations"]} times a training. Best: of
a training, the mean of all, and how much better than DDP's. LSSR: share of all steps that stayed local.
""")
        headings = ["", "steps", "LSSR", "best", "better by", "reached", "MiB", "seconds", "speed-up"]
        parts.append(table(headings, [_cells(row, seeds) for row in rows_of(result)]))
    return "\n".join(parts)


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Draws the quality over time and over traffic, a row of panels for each number of hosts."""
    figure = Figure(figsize=(11, 4.5 * len(results)), layout="constrained")
    panels = figure.subplots(len(results), 2, squeeze=False, sharey="row")
    for (over_time, over_traffic), result in zip(panels, results, strict=True):
        _draw_quality(over_time, result, "seconds")
        _draw_quality(over_traffic, result, "mib")
        over_time.set(xlabel="seconds of training", ylabel=result["metric"], title=f"{result['world_size']} hosts")
        over_traffic.set(xlabel="MiB sent by rank 0", xscale="log")
        over_time.set_ylim(*_range_of_interest(result))
        over_time.legend(fontsize="small")
    figure.savefig(path, dpi=150)


def _draw_quality(panel: Axes, result: dict[str, Any], what: str) -> None:
    """Draws a line for each method, the mean over its seeds."""
    for name, runs in _by_method(result).items():
        curves = list(zip(*(run["points"] for run in runs), strict=True))
        x, y = ([fmean(point[key] for point in points) for points in curves] for key in (what, "quality"))
        panel.plot(x, y, "-o", markersize=3, label=readable(name))
    panel.axhline(result["target"], color="black", linestyle=":", label="target")
    panel.grid(alpha=0.3)


def _range_of_interest(result: dict[str, Any]) -> tuple[float, float]:
    """Returns the range of the quality, without the first quarter of each training."""
    qualities = [result["target"]]
    for run in result["runs"]:
        points = run["points"]
        qualities += [point["quality"] for point in points[len(points) // 4 :]]
    margin = 0.05 * (max(qualities) - min(qualities)) or 1.0
    return min(qualities) - margin, max(qualities) + margin


def _by_method(result: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in result["runs"]:
        groups.setdefault(run["method"], []).append(run)
    return groups


def _best(points: Sequence[Point], sign: int) -> float:
    return max((point["quality"] for point in points), key=lambda quality: sign * quality)


def _reached(points: Sequence[Point], target: float, sign: int) -> Point | None:
    """Returns the first point at which the quality was as good as the target."""
    return next((point for point in points if sign * point["quality"] >= sign * target), None)


def _cells(row: Row, seeds: int) -> list[str]:
    spread = f" ± {row.quality_stdev:.2f}" if seeds > 1 else ""
    return [
        readable(row.method),
        _number(row.steps, ".0f"),
        _number(row.lssr, ".3f"),
        f"{row.quality:.2f}{spread}",
        f"{row.difference:+.2f}",
        f"{row.num_reached} of {seeds}",
        _number(row.mib, ".1f"),
        _number(row.seconds, ".1f"),
        _number(row.speedup, ".2f"),
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
