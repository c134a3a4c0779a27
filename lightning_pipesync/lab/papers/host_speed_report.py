"""What trainings gain on hosts of different speed: a table beside the limits, and the error over time."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from lightning_pipesync.lab.bench.converge import config_of
from lightning_pipesync.lab.bench.converge_report import by_method, number, rows_of, title_of
from lightning_pipesync.lab.bench.named_settings import readable
from lightning_pipesync.lab.bench.own_pace import ServedConfig
from lightning_pipesync.lab.bench.pictures import Picture, colour_and_line
from lightning_pipesync.lab.bench.tables import table
from lightning_pipesync.lab.papers.host_speed import HostSpeeds
from lightning_pipesync.lab.papers.throughput import Throughput
from lightning_pipesync.methods.dear import DeARConfig
from lightning_pipesync.methods.servers.policies import Policy


def as_markdown(result: dict[str, Any]) -> str:
    """Returns the table of the trainings on one number of hosts."""
    settings = result["settings"]
    slow = "".join(f", host {host} at {share}" for host, _, share in (one.partition(":") for one in settings["slow"]))
    stalls = f", stalls {settings['stalls']}" if settings["stalls"] else ""
    rows = rows_of(result)
    baseline = next((row.method for row in rows if row.method.startswith("ddp")), rows[0].method)
    runs = by_method(result)
    cells = []
    for row in rows:
        limit = limit_of(result, row.method)
        staleness = [run["staleness"] for run in runs[row.method] if "staleness" in run]
        cells.append(
            [
                readable(row.method),
                number(row.seconds, ".1f"),
                number(row.speedup, ".2f"),
                f"{_steps_per_second(runs[row.method]) / _steps_per_second(runs[baseline]):.2f}",
                number(limit, ".2f"),
                number(fmean(staleness) if staleness else None, ".2f"),
            ]
        )
    headings = ["", "seconds", "speed-up", "throughput", "limit by throughput", "mean staleness"]
    return f"""### {title_of(result)}, {settings["compute"]} a step{slow}{stalls}

Seconds to the target, as above, and {readable(baseline)}'s over them. Throughput: batches a second over those of
{readable(baseline)}. Its limit: what the policy would reach if nothing but the emulated computation took time, over
what steps would that wait for the slowest host. Staleness: the updates between the weights of a gradient and the
update that uses it.

{table(headings, cells)}"""


def limit_of(result: dict[str, Any], method: str) -> float | None:
    """Returns the throughput over that of steps that wait for all hosts, without any communication.

    None for a method that waits for all hosts in some of its steps only.
    """
    settings, num_hosts = result["settings"], result["world_size"]
    speeds = HostSpeeds.parse(settings["compute"], settings["slow"], settings["stalls"])
    config = config_of(method)
    if method.startswith("ddp") or isinstance(config, DeARConfig):
        return 1.0
    if not isinstance(config, ServedConfig):
        return None
    of_all = Throughput(Policy(num_hosts, waits=True), speeds, num_hosts).gradients_per_second()
    return Throughput(config.policy_for(num_hosts), speeds, num_hosts).gradients_per_second() / of_all


def draw_errors(result: dict[str, Any], path: Path) -> None:
    """Draws the error (100 less the accuracy, or the perplexity) over time, the mean over the seeds of each method."""
    figure = Picture(figsize=(11, 7.5), layout="constrained")
    panel = figure.subplots()
    better = result["higher_is_better"]

    def error_of(quality: float) -> float:
        return 100 - quality if better else quality

    for i, (name, runs) in enumerate(by_method(result).items()):
        if name == "alone":
            continue
        curves = list(zip(*(run["points"] for run in runs), strict=True))
        seconds = [fmean(point["seconds"] for point in points) for points in curves]
        errors = [fmean(error_of(point["quality"]) for point in points) for points in curves]
        panel.plot(seconds, errors, alpha=0.8, label=readable(name), **colour_and_line(i))
    panel.axhline(error_of(result["target"]), color="black", linestyle=":", label="target")
    label = result["metric"].replace("accuracy", "error")
    panel.set(xlabel="seconds of training", ylabel=label, yscale="log", title=title_of(result))
    panel.grid(alpha=0.3, which="both")
    figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize="small")
    figure.savefig(path, dpi=150)


def _steps_per_second(runs: list[dict[str, Any]]) -> float:
    return fmean(run["points"][-1]["steps"] / run["points"][-1]["seconds"] for run in runs)
