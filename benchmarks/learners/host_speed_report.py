"""What trainings gain on hosts of different speed: a table beside the limits, the error over time, and staleness."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.converge_report import COLUMNS, baseline_of, by_method, curves_of, rows_of, title_of
from benchmarks.intervals import number
from benchmarks.learners.host_speed import HostSpeeds
from benchmarks.learners.simulated_learners import gradients_per_second, together_per_second
from benchmarks.named_settings import readable
from lightning_pipesync.lab.bench.pictures import look_of, looks_of, picture
from lightning_pipesync.lab.bench.tables import table_of

#: Panels in a row of the pictures.
_COLUMNS = 3


def as_markdown(result: dict[str, Any], config_of: Callable[[str], Any]) -> str:
    """Returns the table of the trainings on one number of hosts; ``config_of`` returns the settings of a method."""
    settings, baseline, runs = result["settings"], baseline_of(result), by_method(result)
    slow = "".join(f", host {host} at {share}" for host, _, share in (text.partition(":") for text in settings["slow"]))
    stalls = f", stalls {settings['stalls']}" if settings["stalls"] else ""

    def throughput(method: str) -> float:
        return fmean(run["points"][-1]["steps"] / run["points"][-1]["seconds"] for run in runs[method])

    def staleness(method: str) -> float | None:
        found = [run["staleness"] for run in runs[method] if "staleness" in run]
        return fmean(found) if found else None

    columns = {
        **{name: COLUMNS[name] for name in ("", "seconds", "speed-up")},
        "throughput": lambda row: f"{throughput(row.method) / throughput(baseline):.2f}",
        "limit by throughput": lambda row: number(limit_of(result, row.method, config_of(row.method)), ".2f"),
        "mean staleness": lambda row: number(staleness(row.method), ".2f"),
    }
    return f"""### {title_of(result)}, {settings["compute"]} a step{slow}{stalls}

Seconds to the target, as above, and {readable(baseline)}'s over them. Throughput: batches a second over those of
{readable(baseline)}. Its limit: what the policy would reach if nothing but the emulated computation took time, over
what steps would that wait for the slowest host. Staleness: the updates between the weights of a gradient and the
update that uses it.

{table_of(rows_of(result), columns)}"""


def limit_of(result: dict[str, Any], method: str, config: Any) -> float | None:
    """Returns the throughput over that of steps that wait for all hosts, without any communication.

    None for a method of which it depends on the training, such as one that waits for all hosts in some of its steps.
    """
    settings, num_hosts = result["settings"], result["world_size"]
    speeds = HostSpeeds.parse(settings["compute"], settings["slow"], settings["stalls"])
    match method.partition(":")[0]:
        case "ddp" | "dear":
            return 1.0
        case "parameter_server":
            found = gradients_per_second(config, speeds.of_hosts(num_hosts))
            return found / together_per_second(speeds.of_hosts(num_hosts))
    return None


def draw_errors(result: dict[str, Any], path: Path) -> None:
    """Draws the error (100 less the accuracy, or the perplexity) over time, the mean over the seeds.

    A panel has one method, and the baseline.
    """

    def error_of(quality: float) -> float:
        return 100 - quality if result["higher_is_better"] else quality

    curves = {
        name: [[fmean(point[key] for point in points) for points in curve] for key in ("seconds", "quality")]
        for name, curve in curves_of(result).items()
    }
    baseline, looks = baseline_of(result), looks_of(curves)
    others = [name for name in curves if name != baseline] or [baseline]
    rows = -(-len(others) // _COLUMNS)
    shared: Any = {"legend": "below", "sharex": True, "sharey": True}
    with picture(path, (4 * _COLUMNS, 2.2 * rows + 0.6), rows, _COLUMNS, **shared) as panels:
        for panel in panels.flat[len(others) :]:
            panel.set_axis_off()
        for name, panel in zip(others, panels.flat, strict=False):
            for shown in dict.fromkeys((baseline, name)):
                seconds, qualities = curves[shown]
                label = readable(shown) if shown == baseline else None
                look = {**looks[shown], "linestyle": "-", "markersize": 4, "markevery": 4}
                panel.plot(seconds, [*map(error_of, qualities)], label=label, **look)
            panel.axhline(error_of(result["target"]), color="black", linestyle=":", label="target")
            panel.set(yscale="log")
            panel.set_title(_short(name), fontsize="small")
            panel.grid(alpha=0.3, which="both")
        for panel in panels[-1]:
            panel.set_xlabel("seconds of training")
        figure = panels[0, 0].figure
        figure.suptitle(title_of(result))
        figure.supylabel(result["metric"].replace("accuracy", "error"))


def draw_staleness(result: dict[str, Any], path: Path) -> None:
    """Draws a histogram of the staleness of all gradients for each method that has any, of all seeds together.

    Nothing is drawn if no method has any.
    """
    counts = {
        name: [sum(of_all) for of_all in zip_longest(*(run["staleness_counts"] for run in runs), fillvalue=0)]
        for name, runs in by_method(result).items()
        if "staleness_counts" in runs[0]
    }
    if not counts:
        return
    num_rows = -(-len(counts) // _COLUMNS)
    with picture(path, (4 * _COLUMNS, 2.4 * num_rows), num_rows, _COLUMNS, sharey=True) as panels:
        for panel in panels.flat[len(counts) :]:
            panel.set_axis_off()
        for (name, of_method), panel in zip(counts.items(), panels.flat, strict=False):
            total = sum(of_method)
            mean = sum(staleness * count for staleness, count in enumerate(of_method)) / total
            color = look_of(name.partition(":")[0])["color"]
            panel.bar(range(len(of_method)), [100 * count / total for count in of_method], color=color)
            panel.axvline(mean, color="black", linestyle=":")
            panel.set_title(f"{_short(name)}\nmean {mean:.2f}", fontsize="small")
            panel.set_xticks(range(len(of_method)))
            panel.set_xlim(-0.6, max(2, len(of_method) - 0.4))
            panel.grid(alpha=0.3)
        panels[0, 0].figure.supxlabel("staleness in updates")
        panels[0, 0].figure.supylabel("% of the gradients")


def _short(name: str) -> str:
    """Returns the title of the panel of a method: parameter servers are known by their policies."""
    method, _, settings = name.partition(":")
    return readable(settings if method == "parameter_server" else name)
