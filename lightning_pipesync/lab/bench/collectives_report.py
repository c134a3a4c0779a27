"""The report of the collectives: a table and a picture (DeAR, Fig. 5)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.lab.bench.pictures import Picture, colour_and_line
from lightning_pipesync.lab.bench.round_robin import median_and_quartiles
from lightning_pipesync.lab.bench.tables import table


def as_markdown(results: list[dict[str, Any]]) -> str:
    """Returns the tables, for each number of hosts, alpha and beta, and what they predict."""
    parts = []
    for result in results:
        parts.append(f"### {result['world_size']} hosts, {result['bandwidth'] * 8 / 1e6:.0f} Mbit/s by plain TCP\n")
        parts.append("Median ms and, in brackets, the share of the limit that the bytes alone set.\n")
        columns = list(dict.fromkeys(_key(row) for row in result["rows"]))
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
        predicted = list(dict.fromkeys(_key(row) for row in result["rows"] if row["predicted"] is not None))
        if predicted:
            parts.append("Predicted ms by alpha and beta of ours: all_reduce and, in brackets, the error.\n")
            rows = [[_name(*column), *(_prediction(result, column, size) for size in sizes)] for column in predicted]
            parts.append(table(["", *(f"{size / MIB:.3g} MiB" for size in sizes)], rows))
    return "\n".join(parts)


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Draws time over size, one panel for each number of hosts, and the limits."""
    figure = Picture(figsize=(5.5 * len(results), 5.5), layout="constrained")
    panels = figure.subplots(1, len(results), squeeze=False)[0]
    all_curves = [_curves(result) for result in results]
    numbers = {key: i for i, key in enumerate(dict.fromkeys(key for curves in all_curves for key in curves))}
    for panel, result, curves in zip(panels, results, all_curves, strict=True):
        for key, points in curves.items():
            marker = "o" if key[0] == "ours" else "s"
            look = colour_and_line(numbers[key])
            panel.plot(*zip(*points, strict=True), marker=marker, markersize=3, label=_name(*key), **look)
        for operation, style in (("reduce_scatter", ":"), ("all_reduce", "-.")):
            limits = sorted(
                {(r["num_bytes"] / MIB, r["limit"] * 1e3) for r in result["rows"] if r["operation"] == operation}
            )
            panel.plot(*zip(*limits, strict=True), style, color="black", label=f"limit of {operation}")
        panel.set(xscale="log", yscale="log", xlabel="MiB", ylabel="ms", title=f"{result['world_size']} hosts")
        panel.grid(alpha=0.3)
    drawn = {line.get_label(): line for panel in panels for line in panel.get_lines()}
    figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=2, fontsize="small")
    figure.savefig(path, dpi=150)


def _name(implementation: str, operation: str, codec: str) -> str:
    return f"{implementation}: {operation}" + ("" if codec == "none" else f", {codec}")


def _key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["implementation"], row["operation"], row["codec"]


def _row(result: dict[str, Any], column: tuple[str, str, str], size: int) -> dict[str, Any] | None:
    for row in result["rows"]:
        if _key(row) == column and row["num_bytes"] == size:
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


def _prediction(result: dict[str, Any], column: tuple[str, str, str], size: int) -> str:
    if (row := _row(result, column, size)) is None:
        return ""
    median, _, _ = median_and_quartiles(row["seconds"])
    return f"{row['predicted'] * 1e3:.1f} ({row['predicted'] / median - 1:+.0%})"


def _curves(result: dict[str, Any]) -> dict[tuple[str, str, str], list[tuple[float, float]]]:
    """Returns MiB and median ms by size, for each operation without a codec."""
    curves: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for row in result["rows"]:
        if row["codec"] == "none":
            point = (row["num_bytes"] / MIB, median_and_quartiles(row["seconds"])[0] * 1e3)
            curves.setdefault(_key(row), []).append(point)
    return curves
