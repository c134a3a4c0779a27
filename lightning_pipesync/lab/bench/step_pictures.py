"""Pictures of the time of a training step (DeAR, Figs. 7 and 8)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_pipesync.core.cost import StepCost
from lightning_pipesync.lab.bench.pictures import Picture
from lightning_pipesync.lab.bench.step_report import rows_of


def draw(results: list[dict[str, Any]], folder: Path) -> None:
    """Draws ``speedup.png``, ``scaling.png`` and ``breakdown.png`` in ``folder``."""
    draw_speedup(results, folder / "speedup.png")
    draw_scaling(results, folder / "scaling.png")
    draw_breakdown(results, folder / "breakdown.png")


def draw_speedup(results: list[dict[str, Any]], path: Path) -> None:
    """Draws the speed-up over DDP by the ratio of communication to computation, with the limits."""
    figure = Picture(figsize=(5 * len(results), 4.5), layout="constrained")
    panels = figure.subplots(1, len(results), squeeze=False, sharey=True)[0]
    for panel, result in zip(panels, results, strict=True):
        ratios = [StepCost(**run["cost"]).ratio for run in result["runs"]]
        by_run = [{row.name: row for row in rows_of(run)} for run in result["runs"]]
        for name in by_run[0]:
            if not name.startswith("DDP, ") and name != "no communication":
                panel.plot(ratios, [rows[name].over_ddp for rows in by_run], "-o", markersize=3, label=name)
        costs = [StepCost(**run["cost"]) for run in result["runs"]]
        panel.plot(ratios, [cost.baseline / cost.dear for cost in costs], ":k", label="limit of DeAR (Eqs. 7, 8)")
        panel.plot(ratios, [cost.baseline / cost.eager for cost in costs], "--k", label="limit of eager gathers")
        panel.plot(ratios, [cost.baseline / cost.compute for cost in costs], "-.k", label="without communication")
        panel.axhline(1.0, color="gray", linewidth=0.8)
        title = f"{result['world_size']} hosts"
        panel.set(xscale="log", xlabel="communication / computation", ylabel="times as fast as DDP", title=title)
        panel.set_xticks(ratios, [f"{ratio:.2g}" for ratio in ratios])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize="small")
    figure.savefig(path, dpi=150)


def draw_scaling(results: list[dict[str, Any]], path: Path) -> None:
    """Draws the speed-up over one host by number of hosts, for the ratio in the middle, with S_max and P."""
    figure = Picture(figsize=(6, 4.5), layout="constrained")
    panel = figure.subplots()
    hosts = [result["world_size"] for result in results]
    runs = [result["runs"][len(result["runs"]) // 2] for result in results]
    curves: dict[str, list[float]] = {}
    for world_size, run in zip(hosts, runs, strict=True):
        for row in rows_of(run):
            if row.name != "no communication":
                curves.setdefault(row.name, []).append(world_size * row.scaling_efficiency)
    for name, speedups in curves.items():
        panel.plot(hosts, speedups, "-o", markersize=3, label=name)
    limits = [StepCost(**run["cost"]).max_speedup(world_size) for world_size, run in zip(hosts, runs, strict=True)]
    panel.plot(hosts, limits, ":k", label="S_max (Eq. 6)")
    panel.plot(hosts, hosts, "-.k", label="linear")
    title = f"communication {StepCost(**runs[0]['cost']).ratio:.2g} times computation"
    panel.set(xlabel="hosts", ylabel="times as fast as one host", title=title, xticks=hosts)
    panel.legend(fontsize="small")
    panel.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def draw_breakdown(results: list[dict[str, Any]], path: Path) -> None:
    """Draws the parts of a step, for the ratio in the middle: forward, backward, update, exposed communication."""
    figure = Picture(figsize=(5 * len(results), 4), layout="constrained")
    panels = figure.subplots(1, len(results), squeeze=False)[0]
    for panel, result in zip(panels, results, strict=True):
        run = result["runs"][len(result["runs"]) // 2]
        cost, rows = StepCost(**run["cost"]), rows_of(run)
        left = [0.0] * len(rows)
        shared = {"forward": cost.forward, "backward": cost.backward, "update": cost.update}
        bars = {part: [seconds] * len(rows) for part, seconds in shared.items()}
        bars["exposed communication"] = [row.exposed for row in rows]
        for part, values in bars.items():
            panel.barh([row.name for row in rows], [value * 1e3 for value in values], left=left, label=part)
            left = [start + value * 1e3 for start, value in zip(left, values, strict=True)]
        panel.invert_yaxis()
        panel.set(xlabel="ms a step", title=f"{result['world_size']} hosts, ratio {cost.ratio:.2g}")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize="small")
    figure.savefig(path, dpi=150)
