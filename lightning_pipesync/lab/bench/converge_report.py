"""The report of trainings to a target: a table and a picture (SelSync, Table I)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from matplotlib.axes import Axes

from lightning_pipesync.lab.bench.named_settings import readable
from lightning_pipesync.lab.bench.pictures import Picture
from lightning_pipesync.lab.bench.tables import interval_of, table

Point = dict[str, float]


@dataclass(frozen=True)
class Row:
    """The trainings with one method.

    Attributes:
        method: the method with its settings.
        lssr: the share of local steps, the mean over the seeds; None if it is not defined.
        best: the best quality of a training, the mean over the seeds.
        best_interval: half the 95 % confidence interval of ``best``; None for one seed.
        final: the final quality of a training, the mean over the seeds.
        final_interval: half the 95 % confidence interval of ``final``; None for one seed.
        difference: the best quality less the baseline's with the same seed, positive if better, the mean over the
            seeds.
        difference_interval: half the 95 % confidence interval of ``difference``; None for one seed.
        spread: the distance of the ranks' weights, the mean over the evaluations and the seeds; None if the ranks are
            not at the same step.
        num_reached: the number of trainings that have reached the target.
        steps: the steps to the target, the median over the seeds; None if not all of them have reached it.
        seconds: the seconds to the target, the median over the seeds; None if not all of them have reached it.
        mib: the MiB that rank 0 has sent to the target, the median over the seeds; None if not all have reached it.
        step_seconds: the seconds of a step, the median of the times from one measurement to the next.
        speedup: the baseline's seconds over ``seconds``.
        share_of_limit: the seconds that the baseline's steps to the target take without communication, over
            ``seconds``; None if no rank was trained alone.
    """

    method: str
    lssr: float | None
    best: float
    best_interval: float | None
    final: float
    final_interval: float | None
    difference: float
    difference_interval: float | None
    spread: float | None
    num_reached: int
    steps: float | None
    seconds: float | None
    mib: float | None
    step_seconds: float
    speedup: float | None
    share_of_limit: float | None


def rows_of(result: dict[str, Any]) -> list[Row]:
    """Returns a row for each method; the baseline is the first DDP, or the first method if there is none."""
    trainings = by_method(result)
    baseline = next((name for name in trainings if name.startswith("ddp")), next(iter(trainings)))
    sign = 1 if result["higher_is_better"] else -1
    best = {name: [_best(run["points"], sign) for run in runs] for name, runs in trainings.items()}
    reached = {
        name: [point for run in runs if (point := _reached(run["points"], result["target"], sign))]
        for name, runs in trainings.items()
    }

    def to_target(name: str, what: str) -> float | None:
        points = reached[name]
        return median(point[what] for point in points) if len(points) == len(trainings[name]) else None

    baseline_steps = to_target(baseline, "steps")
    limit = baseline_steps * _step_seconds(trainings["alone"]) if baseline_steps and "alone" in trainings else None
    rows = []
    for name, runs in trainings.items():
        if name == "alone":  # its quality is that of one rank
            continue
        lssr = [run["lssr"] for run in runs if run["lssr"] is not None]
        differences = [sign * (one - other) for one, other in zip(best[name], best[baseline], strict=True)]
        final = [run["points"][-1]["quality"] for run in runs]
        spreads = [point["spread"] for run in runs for point in run["points"]]
        seconds, baseline_seconds = to_target(name, "seconds"), to_target(baseline, "seconds")
        rows.append(
            Row(
                method=name,
                lssr=fmean(lssr) if lssr else None,
                best=fmean(best[name]),
                best_interval=interval_of(best[name]),
                final=fmean(final),
                final_interval=interval_of(final),
                difference=fmean(differences),
                difference_interval=interval_of(differences),
                spread=fmean(spreads) if None not in spreads else None,
                num_reached=len(reached[name]),
                steps=to_target(name, "steps"),
                seconds=seconds,
                mib=to_target(name, "mib"),
                step_seconds=_step_seconds(runs),
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
best is. LSSR: share of all steps that stayed local. Spread: root mean square of the distances of the ranks' own
weights to those that were measured, over their norm, the mean of all measurements. Limit: DDP's steps to the target,
each without communication, as the ranks of `alone` take them. Ranks that go at their own pace do not wait for a
measurement: their weights are copied, and a step is as many batches as there are hosts.
""")
        to_target = ["reached", "MiB", "ms a step", "seconds", "speed-up", "share of the limit"]
        headings = ["", "steps", "LSSR", "best", "better by", "final", "spread", *to_target]
        parts.append(table(headings, [_cells(row, seeds) for row in rows_of(result)]))
    return "\n".join(parts)


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Draws the quality over steps, time and traffic, with a row of panels for each number of hosts."""
    figure = Picture(figsize=(16, 4.5 * len(results)), layout="constrained")
    panels = figure.subplots(len(results), 3, squeeze=False, sharey="row")
    for (over_steps, over_time, over_traffic), result in zip(panels, results, strict=True):
        _draw_quality(over_steps, result, "steps")
        _draw_quality(over_time, result, "seconds")
        _draw_quality(over_traffic, result, "mib")
        over_steps.set(xlabel="steps", ylabel=result["metric"], title=title_of(result))
        over_time.set(xlabel="seconds of training")
        over_traffic.set(xlabel="MiB sent by rank 0", xscale="log")
        over_steps.set_ylim(*_range_of_interest(result))
    # Outside the panels, where it covers no curve; all rows have the same methods.
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    figure.savefig(path, dpi=150)


def title_of(result: dict[str, Any]) -> str:
    """Returns the task and the number of hosts."""
    return f"{result['settings']['task']} on {result['world_size']} hosts"


def _draw_quality(panel: Axes, result: dict[str, Any], what: str) -> None:
    """Draws a line per method, the mean over its seeds, and their range in a lighter shade."""
    for name, runs in by_method(result).items():
        if name == "alone":
            continue
        curves = list(zip(*(run["points"] for run in runs), strict=True))
        x, y = ([fmean(point[key] for point in points) for points in curves] for key in (what, "quality"))
        [line] = panel.plot(x, y, "-o", markersize=3, label=readable(name))
        lowest, highest = ([f(point["quality"] for point in points) for points in curves] for f in (min, max))
        panel.fill_between(x, lowest, highest, color=line.get_color(), alpha=0.12, linewidth=0)
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


def by_method(result: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Returns the trainings with each method."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in result["runs"]:
        groups.setdefault(run["method"], []).append(run)
    return groups


def _step_seconds(runs: list[dict[str, Any]]) -> float:
    """Returns the seconds of a step, the median of the times from one measurement to the next."""
    start = {"steps": 0, "seconds": 0.0}
    spans = [span for run in runs for span in pairwise([start, *run["points"]])]
    return median((end["seconds"] - begin["seconds"]) / (end["steps"] - begin["steps"]) for begin, end in spans)


def _best(points: Sequence[Point], sign: int) -> float:
    return max((point["quality"] for point in points), key=lambda quality: sign * quality)


def _reached(points: Sequence[Point], target: float, sign: int) -> Point | None:
    """Returns the first point at which the quality was as good as the target."""
    return next((point for point in points if sign * point["quality"] >= sign * target), None)


def _cells(row: Row, seeds: int) -> list[str]:
    return [
        readable(row.method),
        number(row.steps, ".0f"),
        number(row.lssr, ".3f"),
        _with_interval(row.best, row.best_interval),
        _with_interval(row.difference, row.difference_interval, "+.2f"),
        _with_interval(row.final, row.final_interval),
        number(row.spread, ".2%"),
        f"{row.num_reached} of {seeds}",
        number(row.mib, ".1f"),
        f"{1e3 * row.step_seconds:.0f}",
        number(row.seconds, ".1f"),
        number(row.speedup, ".2f"),
        number(row.share_of_limit, ".0%"),
    ]


def _with_interval(value: float, interval: float | None, form: str = ".2f") -> str:
    return format(value, form) if interval is None else f"{value:{form}} ± {interval:.2f}"


def number(value: float | None, form: str) -> str:
    """Returns a number in this format; a dash if there is none."""
    return "-" if value is None else format(value, form)
