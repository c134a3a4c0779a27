"""The report of the throughput of pipelines: a table, and a timeline of the stages."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.patches import Patch

from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.lab.bench.named_settings import readable
from lightning_pipesync.lab.bench.pictures import OF_PARTS, Picture
from lightning_pipesync.lab.bench.tables import table
from lightning_pipesync.lab.bench.timeline_report import COMPUTATION


def as_markdown(results: list[dict[str, Any]]) -> str:
    """Returns a table for each number of stages and each duration of one."""
    parts = []
    for result in results:
        bandwidth, mib = result["bandwidth"], result["settings"]["activation_mib"]
        for run in result["runs"]:
            stage = run["stage_seconds"]
            hop = mib * MIB / bandwidth
            rows = []
            for candidate in run["candidates"]:
                seconds = median(candidate["seconds"])
                busy = median(candidate["processor_seconds"])
                cells = f"{seconds * 1e3:.1f}", f"{stage / seconds:.0%}", f"{busy * 1e3:.1f}"
                rows.append([readable(candidate["name"]), *cells])
            parts.append(
                f"""### {result["world_size"]} stages of {stage * 1e3:g} ms

A stage computes {stage * 1e3:g} ms for each mini-batch, and activations of {mib:g} MiB travel {hop * 1e3:.1f} ms (TCP
reaches {bandwidth * 8 / 1e6:.0f} Mbit/s). The share is of the throughput of stages that never wait; the processor time
is that of a stage for a mini-batch, of all threads.

{table(["", "ms a mini-batch", "of the limit", "processor ms"], rows)}"""
            )
    return "\n".join(parts)


def draw(run: dict[str, Any], path: Path) -> None:
    """Draws a panel per candidate, with a row per stage, the first on top, and the numbers of mini-batches."""
    candidates = run["candidates"]
    num_stages = len(candidates[0]["trace"])
    figure = Picture(figsize=(11, 0.6 + (0.6 + 0.35 * num_stages) * len(candidates)), layout="constrained")
    panels = figure.subplots(len(candidates), 1, squeeze=False, sharex=True)[:, 0]
    for panel, candidate in zip(panels, candidates, strict=True):
        for stage, spans in enumerate(candidate["trace"]):
            parts = len(spans) // (4 * num_stages)  # micro-batches: forward and backward, two mini-batches a stage
            counts = dict.fromkeys(COMPUTATION, 0)
            for kind, begin, end in spans:
                number = counts[kind] // parts
                counts[kind] += 1
                alpha = 0.95 if number % 2 else 0.6
                panel.barh(-stage, end - begin, left=begin, height=0.85, color=OF_PARTS[kind], alpha=alpha)
                if parts == 1:
                    panel.text((begin + end) / 2, -stage, str(number + 1), ha="center", va="center", fontsize=6)
        panel.set_yticks([-stage for stage in range(num_stages)], [f"stage {n}" for n in range(1, num_stages + 1)])
        panel.set_title(readable(candidate["name"]), loc="left", fontsize="medium")
    panels[-1].set_xlabel("seconds")
    patches = [Patch(color=OF_PARTS[kind], label=kind) for kind in COMPUTATION]
    figure.legend(handles=patches, loc="outside upper right", ncols=2, fontsize="small")
    figure.savefig(path, dpi=150)
