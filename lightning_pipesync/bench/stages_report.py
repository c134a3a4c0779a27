"""The throughput of pipelines: a table."""

from __future__ import annotations

from statistics import median
from typing import Any

from lightning_pipesync.bench.named_settings import readable
from lightning_pipesync.bench.results import table
from lightning_pipesync.core.buckets import MIB


def as_markdown(results: list[dict[str, Any]]) -> str:
    """Returns a table for each number of stages and each duration of one."""
    parts = []
    for result in results:
        bandwidth, mib = result["bandwidth"], result["settings"]["activation_mib"]
        for run in result["runs"]:
            stage = run["stage_seconds"]
            hop = mib * MIB / bandwidth
            rows = []
            for contestant in run["contestants"]:
                seconds = median(contestant["seconds"])
                rows.append([readable(contestant["name"]), f"{seconds * 1e3:.1f}", f"{stage / seconds:.0%}"])
            parts.append(
                f"""### {result["world_size"]} stages of {stage * 1e3:g} ms

A stage computes {stage * 1e3:g} ms for each mini-batch, and activations of {mib:g} MiB travel {hop * 1e3:.1f} ms (TCP
reaches {bandwidth * 8 / 1e6:.0f} Mbit/s). The share is of the throughput of stages that never wait.

{table(["", "ms a mini-batch", "of the limit"], rows)}"""
            )
    return "\n".join(parts)
