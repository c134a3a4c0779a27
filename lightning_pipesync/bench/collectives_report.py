"""The report of the collectives: a table and a picture (DeAR, Fig. 5)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lightning_pipesync.bench.results import table
from lightning_pipesync.bench.round_robin import median_and_quartiles
from lightning_pipesync.core.buckets import MIB


def as_markdown(results: list[dict[str, Any]]) -> str:
    """Returns the tables, one for each number of hosts, and alpha and beta."""
    parts = []
    for result in results:
        parts.append(f"### {result['world_size']} hosts, {result['bandwidth'] * 8 / 1e6:.0f} Mbit/s by plain TCP\n")
        parts.append("Median ms and, in brackets, the share of the limit that the bytes alone set.\n")
        columns = list(dict.fromkeys((r["implementation"], r["operation"], r["codec"]) for r in result["rows"]))
        sizes = sorted({row["num_bytes"] for row in result["rows"]})
        rows = [[_name(*column), *(_cell(result, column, size) for size in sizes)] for column in columns]
        parts.append(table(["", *(f"{size / MIB:.3g} MiB" for size in sizes)], rows))
        parts.append("Median seconds of processor time for each GiB, user and system, all threads of a rank.\n")
        rows = [[_name(*column), *(_processor(result, column, size) for size in sizes)] for column in columns]
        parts.append(table(["", *(f"{size / MIB:.3g} MiB" for size in sizes)], rows))
        parts.append("alpha and beta of Eqs. 3-5, with their standard errors:\n")
        fits = [
            [
                _name(fit["implementation"], fit["operation"], "none"),
                f"{fit['alpha'] * 1e3:.3f} ± {fit['alpha_error'] * 1e3:.3f}",
                f"{fit['beta'] * 1e9:.3f} ± {fit['beta_error'] * 1e9:.3f}",
            ]
            for fit in result["fits"]
        ]
        parts.append(table(["", "alpha (ms)", "beta (ns a byte)"], fits))
    return "\n".join(parts)


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Draws time over size, one panel for each number of hosts, and the limits."""
    figure = Figure(figsize=(5.5 * len(results), 4.5), layout="constrained")
    panels = figure.subplots(1, len(results), squeeze=False)[0]
    for panel, result in zip(panels, results, strict=True):
        for (implementation, operation, codec), points in _curves(result).items():
            if codec == "none":
                style = "-o" if implementation == "ours" else "--s"
                panel.plot(
                    *zip(*points, strict=True), style, markersize=3, label=_name(implementation, operation, codec)
                )
        for operation, style in (("reduce_scatter", ":"), ("all_reduce", "-.")):
            limits = sorted(
                {(r["num_bytes"] / MIB, r["limit"] * 1e3) for r in result["rows"] if r["operation"] == operation}
            )
            panel.plot(*zip(*limits, strict=True), style, color="black", label=f"limit of {operation}")
        panel.set(xscale="log", yscale="log", xlabel="MiB", ylabel="ms", title=f"{result['world_size']} hosts")
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize="small")
    figure.savefig(path, dpi=150)


def _name(implementation: str, operation: str, codec: str) -> str:
    return f"{implementation}: {operation}" + ("" if codec == "none" else f", {codec}")


def _row(result: dict[str, Any], column: tuple[str, str, str], size: int) -> dict[str, Any] | None:
    for row in result["rows"]:
        if (row["implementation"], row["operation"], row["codec"]) == column and row["num_bytes"] == size:
            found: dict[str, Any] = row
            return found
    return None


def _cell(result: dict[str, Any], column: tuple[str, str, str], size: int) -> str:
    if (row := _row(result, column, size)) is None:
        return ""
    median, _, _ = median_and_quartiles(row["seconds"])
    share = f" ({row['limit'] / median:.0%})" if row["codec"] == "none" else ""
    return f"{median * 1e3:.1f}{share}"


def _processor(result: dict[str, Any], column: tuple[str, str, str], size: int) -> str:
    if (row := _row(result, column, size)) is None:
        return ""
    median, _, _ = median_and_quartiles(row["processor_seconds"])
    return f"{median / size * 1024 * MIB:.2f}"


def _curves(result: dict[str, Any]) -> dict[tuple[str, str, str], list[tuple[float, float]]]:
    curves: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for row in result["rows"]:
        key = (row["implementation"], row["operation"], row["codec"])
        curves.setdefault(key, []).append((row["num_bytes"] / MIB, median_and_quartiles(row["seconds"])[0] * 1e3))
    return curves
