"""A picture of how stale gradients were, by policy."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import Any

from lightning_pipesync.lab.bench.converge_report import by_method
from lightning_pipesync.lab.bench.named_settings import readable
from lightning_pipesync.lab.bench.pictures import Picture

#: Panels in a row.
_COLUMNS = 3


def draw(result: dict[str, Any], path: Path) -> None:
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
    figure = Picture(figsize=(4 * _COLUMNS, 2.4 * num_rows), layout="constrained")
    panels = figure.subplots(num_rows, _COLUMNS, squeeze=False, sharey=True).flat
    for (name, of_method), panel in zip(counts.items(), panels, strict=False):
        total = sum(of_method)
        mean = sum(staleness * count for staleness, count in enumerate(of_method)) / total
        panel.bar(range(len(of_method)), [100 * count / total for count in of_method])
        panel.axvline(mean, color="black", linestyle=":")
        title = readable(name.removeprefix("parameter_server:"))
        panel.set_title(f"{title}\nmean {mean:.2f}", fontsize="small")
        panel.set_xticks(range(len(of_method)))
        panel.set_xlim(-0.6, max(2, len(of_method) - 0.4))
        panel.grid(alpha=0.3)
    for panel in panels:  # those that are left
        panel.set_axis_off()
    figure.supxlabel("staleness in updates")
    figure.supylabel("% of the gradients")
    figure.savefig(path, dpi=150)
