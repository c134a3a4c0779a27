"""The report of a timeline of computation and communication: a table and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.patches import Patch

from lightning_pipesync.lab.bench.pictures import OF_PARTS, Picture
from lightning_pipesync.lab.bench.tables import table

COMPUTATION = ("forward", "backward")


def as_markdown(result: dict[str, Any]) -> str:
    """Returns a table of the computation, the communication and their overlap in a step, by candidate."""
    rows = []
    for timeline in result["timelines"]:
        spans, steps = timeline["spans"], len(timeline["steps"])
        computing = merged([(s["start"], s["end"]) for s in spans if s["kind"] in COMPUTATION])
        communicating = merged([(s["start"], s["end"]) for s in spans if s["kind"] not in COMPUTATION])
        total, both = length(communicating), length(computing) + length(communicating)
        hidden = both - length(merged(computing + communicating))
        parts = (timeline["steps"][-1], length(computing), total)
        share = f"{hidden / total:.0%}" if total else ""
        rows.append([timeline["name"], *(f"{part / steps * 1e3:.0f}" for part in parts), share])
    return table(["", "ms a step", "computing", "communicating", "of it hidden"], rows)


def merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the union of spans as disjoint spans."""
    disjoint: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if disjoint and start <= disjoint[-1][1]:
            disjoint[-1] = (disjoint[-1][0], max(end, disjoint[-1][1]))
        else:
            disjoint.append((start, end))
    return disjoint


def length(disjoint: list[tuple[float, float]]) -> float:
    """Returns the total length of disjoint spans."""
    return sum(end - start for start, end in disjoint)


def draw(result: dict[str, Any], path: Path) -> None:
    """Draws a panel per candidate, with a row for computation and one for communication, in alternating shades."""
    timelines = result["timelines"]
    figure = Picture(figsize=(10, 0.6 + 1.4 * len(timelines)), layout="constrained")
    panels = figure.subplots(len(timelines), 1, squeeze=False, sharex=True)[:, 0]
    for panel, timeline in zip(panels, timelines, strict=True):
        for span in timeline["spans"]:
            row = 1 if span["kind"] in COMPUTATION else 0
            seconds = span["end"] - span["start"]
            alpha = 0.95 if span["number"] % 2 else 0.6
            panel.barh(row, seconds, left=span["start"], height=0.8, color=OF_PARTS[span["kind"]], alpha=alpha)
        for end in timeline["steps"]:
            panel.axvline(end, color="black", linewidth=0.8, linestyle=":")
        panel.set_yticks([1, 0], ["computation", "communication"])
        panel.set_title(timeline["name"], loc="left", fontsize="medium")
    panels[-1].set_xlabel("seconds")
    shown = {span["kind"] for timeline in timelines for span in timeline["spans"]}
    patches = [Patch(color=color, label=kind) for kind, color in OF_PARTS.items() if kind in shown]
    figure.legend(handles=patches, loc="outside upper right", ncols=len(patches), fontsize="small")
    figure.savefig(path, dpi=150)
