"""The report of trainings to a target: a table and a picture (SelSync, Table I)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.intervals import interval_of, number, with_interval
from benchmarks.named_settings import readable
from lightning_pipesync.lab.bench.pictures import looks_of, picture
from lightning_pipesync.lab.bench.tables import table_of

Point = dict[str, float]


@dataclass(frozen=True)
class Row:
    """The trainings with one method; what it takes to reach the target is their median, None if not all reached it."""

    method: str
    #: The share of local steps; None if it is not defined.
    lssr: float | None
    #: Of each seed the best quality, that less the baseline's (positive if better), and the last quality.
    best: Sequence[float]
    differences: Sequence[float]
    final: Sequence[float]
    #: The distance of the ranks' weights, the mean over the evaluations; None if the ranks are not at the same step.
    spread: float | None
    num_reached: int
    steps: float | None
    seconds: float | None
    #: Sent by rank 0.
    mib: float | None
    #: Of a whole training: rounds that are rare have their share.
    step_seconds: float
    #: The baseline's seconds over ``seconds``.
    speedup: float | None
    #: The seconds that the baseline's steps to the target take without communication, over ``seconds``; None if no rank
    #: was trained alone.
    share_of_limit: float | None


COLUMNS = {
    "": lambda row: readable(row.method),
    "steps": lambda row: number(row.steps, ".0f"),
    "LSSR": lambda row: number(row.lssr, ".3f"),
    "best": lambda row: _mean(row.best),
    "better by": lambda row: _mean(row.differences, "+.2f"),
    "final": lambda row: _mean(row.final),
    "spread": lambda row: number(row.spread, ".2%"),
    "reached": lambda row: f"{row.num_reached} of {len(row.best)}",
    "MiB": lambda row: number(row.mib, ".1f"),
    "ms a step": lambda row: f"{1e3 * row.step_seconds:.0f}",
    "seconds": lambda row: number(row.seconds, ".1f"),
    "speed-up": lambda row: number(row.speedup, ".2f"),
    "share of the limit": lambda row: number(row.share_of_limit, ".0%"),
}


def _mean(values: Sequence[float], form: str = ".2f") -> str:
    return with_interval(fmean(values), interval_of(values), form)


def baseline_of(result: dict[str, Any]) -> str:
    """Returns the first DDP, or the first method if there is none."""
    methods = list(by_method(result))
    return next((name for name in methods if name.startswith("ddp")), methods[0])


def rows_of(result: dict[str, Any]) -> list[Row]:
    """Returns a row for each method."""
    trainings, baseline = by_method(result), baseline_of(result)
    sign = 1 if result["higher_is_better"] else -1
    best = {name: [best_of(run["points"], sign) for run in runs] for name, runs in trainings.items()}
    reached = {
        name: [point for run in runs if (point := _reached(run["points"], result["target"], sign))]
        for name, runs in trainings.items()
    }

    def to_target(name: str, what: str) -> float | None:
        points = reached[name]
        return median(point[what] for point in points) if len(points) == len(trainings[name]) else None

    baseline_steps, baseline_seconds = to_target(baseline, "steps"), to_target(baseline, "seconds")
    limit = baseline_steps * step_seconds(trainings["alone"]) if baseline_steps and "alone" in trainings else None
    rows = []
    for name, runs in trainings.items():
        if name == "alone":  # its quality is that of one rank
            continue
        lssr = [run["lssr"] for run in runs if run["lssr"] is not None]
        spreads = [point["spread"] for run in runs for point in run["points"]]
        seconds = to_target(name, "seconds")
        rows.append(
            Row(
                method=name,
                lssr=fmean(lssr) if lssr else None,
                best=best[name],
                differences=[sign * (ours - other) for ours, other in zip(best[name], best[baseline], strict=True)],
                final=[run["points"][-1]["quality"] for run in runs],
                spread=fmean(spreads) if None not in spreads else None,
                num_reached=len(reached[name]),
                steps=to_target(name, "steps"),
                seconds=seconds,
                mib=to_target(name, "mib"),
                step_seconds=step_seconds(runs),
                speedup=baseline_seconds / seconds if baseline_seconds and seconds else None,
                share_of_limit=limit / seconds if limit and seconds else None,
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
        consolidations = max(point["consolidation_mib"] for run in result["runs"] for point in run["points"])
        better = "at least" if result["higher_is_better"] else "at most"
        parts.append(f"""### {title_of(result)}{network}{skew}

Steps, seconds and MiB (sent by rank 0) until the {result["metric"]} was {better} {result["target"]:g}: medians of
{seeds} trainings, and how many of them got there; it was measured {settings["evaluations"]} times a training, for
which the weights were consolidated: that is not counted, and takes up to {consolidations:.1f} MiB each time. Best and
final: of a training, the mean of all ± 95 % confidence interval, and how much better than DDP's with the same seed the
best is. LSSR: share of all steps that stayed local. Spread: root mean square of the distances of each rank's weights
to those that were measured, over their norm, the mean of all measurements. Limit: DDP's steps to the target, each
without communication, as the ranks of `alone` take them. Asynchronous ranks do not wait for a measurement: their
weights are copied, and a step is as many batches as there are hosts.
""")
        parts.append(table_of(rows_of(result), COLUMNS))
    return "\n".join(parts)


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Draws the quality over steps, time and traffic, with a row of panels for each number of hosts.

    A line is the mean over a method's seeds, its lighter shade their range.
    """
    over = {"steps": "steps", "seconds": "seconds of training", "mib": "MiB sent by rank 0"}
    size = (16, 4.5 * len(results))
    with picture(path, size, len(results), len(over), legend="below", legend_columns=3, sharey="row") as panels:
        for row, result in zip(panels, results, strict=True):
            looks = looks_of(curves_of(result))
            for panel, (what, label) in zip(row, over.items(), strict=True):
                for name, curves in curves_of(result).items():
                    x, y = ([fmean(point[key] for point in points) for points in curves] for key in (what, "quality"))
                    panel.plot(x, y, markersize=4, label=readable(name), **looks[name])
                    ends = ([f(point["quality"] for point in points) for points in curves] for f in (min, max))
                    panel.fill_between(x, *ends, color=looks[name]["color"], alpha=0.12, linewidth=0)
                panel.axhline(result["target"], color="black", linestyle=":", label="target")
                panel.set(xlabel=label, xscale="log" if what == "mib" else "linear")
                panel.grid(alpha=0.3)
            row[0].set(ylabel=result["metric"], title=title_of(result))
            row[0].set_ylim(*_range_of_interest(result))


def title_of(result: dict[str, Any]) -> str:
    """Returns the task, its model if one was chosen, and the number of hosts."""
    settings = result["settings"]
    model = f" with {chosen}" if (chosen := settings.get("model")) else ""
    return f"{settings['task']}{model} on {result['world_size']} hosts"


def by_method(result: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Returns the trainings with each method."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in result["runs"]:
        groups.setdefault(run["method"], []).append(run)
    return groups


def curves_of(result: dict[str, Any]) -> dict[str, list[tuple[Point, ...]]]:
    """Returns what pictures show: for each method but ``alone``, the points of all seeds at each evaluation."""
    methods = by_method(result)
    return {
        name: [*zip(*(r["points"] for r in runs), strict=True)] for name, runs in methods.items() if name != "alone"
    }


def _range_of_interest(result: dict[str, Any]) -> tuple[float, float]:
    """Returns the range of the quality, without the first quarter of each training."""
    qualities = [result["target"]]
    for run in result["runs"]:
        points = run["points"]
        qualities += [point["quality"] for point in points[len(points) // 4 :]]
    margin = 0.05 * (max(qualities) - min(qualities)) or 1.0
    return min(qualities) - margin, max(qualities) + margin


def step_seconds(runs: list[dict[str, Any]]) -> float:
    """Returns the mean seconds of a step of a training, the median of several."""
    return median(run["points"][-1]["seconds"] / run["points"][-1]["steps"] for run in runs)


def best_of(points: Sequence[Point], sign: int) -> float:
    """Returns the best quality of a training, with a ``sign`` of -1 the lowest."""
    return max((point["quality"] for point in points), key=lambda quality: sign * quality)


def _reached(points: Sequence[Point], target: float, sign: int) -> Point | None:
    """Returns the first point at which the quality was as good as the target."""
    return next((point for point in points if sign * point["quality"] >= sign * target), None)
