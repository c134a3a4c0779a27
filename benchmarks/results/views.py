"""Tables of the benchmarks' results as the docs show them: fewer columns and rows than the reports."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import floor
from typing import Any

from benchmarks import converge_report
from benchmarks.converge_report import Row as TrainingRow
from benchmarks.results.exhibit import Picture, Table
from benchmarks.results.job import Record
from benchmarks.results.redraw import command_of, redraw
from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.core.cost import StepCost
from lightning_pipesync.lab.bench import step as step_report
from lightning_pipesync.lab.bench.collectives import name_of, time_of
from lightning_pipesync.lab.bench.named_settings import readable
from lightning_pipesync.lab.bench.step import Row as StepRow
from lightning_pipesync.lab.bench.tables import table

#: A name for a method with its settings, as in ``selsync:delta=0.3,smoothing=0.16``.
Names = Mapping[str, str]


def named(method: str, names: Names | None = None) -> str:
    """Returns the name that a table has for a method with its settings."""
    return (names or {}).get(method, f"`{readable(method)}`")


def trainings(records: Sequence[Record], columns: Sequence[str], names: Names | None = None) -> str:
    """Returns a table of trainings for each task and number of hosts, under a line that says which."""
    parts = []
    for record in records:
        for result in record.results:
            reached = reachable(result)
            rows = [
                [named(row.method, names), *(converge_report.COLUMNS[column](row) for column in columns)]
                for row in converge_report.rows_of(reached)
            ]
            parts += [_of_trainings(reached, is_own=reached is result), table(["", *columns], rows)]
    return "\n".join(parts)


def reachable(result: dict[str, Any]) -> dict[str, Any]:
    """Returns trainings with a target that the baseline reaches with all seeds: the one it has, or its own worst."""
    baseline = converge_report.baseline_of(result)
    sign = 1 if result["higher_is_better"] else -1
    runs = converge_report.by_method(result)[baseline]
    worst = min(sign * converge_report.best_of(run["points"], sign) for run in runs)
    if worst >= sign * result["target"]:
        return result
    return {**result, "target": sign * floor(10 * worst) / 10}


def _of_trainings(result: dict[str, Any], is_own: bool) -> str:
    settings = result["settings"]
    network = f", {result['rate']}" if result["rate"] else ""
    sign = "at least" if result["higher_is_better"] else "at most"
    which = "the target is" if is_own else "the target is what the baseline reaches with all seeds,"
    target = f"{which} a {result['metric']} of {sign} {result['target']:g}"
    skew = f", {labels} labels on each" if (labels := settings.get("labels_per_worker")) else ""
    title = f"{settings['task']}, {result['world_size']} workers{skew}{network}"
    return f"**{title}**: {steps_of(result):.0f} steps; {target}.\n"


def steps_of(result: dict[str, Any]) -> float:
    """Returns the number of steps of the longest training."""
    steps: float = max(point["steps"] for run in result["runs"] for point in run["points"])
    return steps


def training_table(name: str, jobs: Sequence[str], columns: Sequence[str], names: Names | None = None) -> Table:
    """Returns the exhibit of :func:`trainings`."""
    return Table(name, (*jobs,), lambda records: trainings(records, columns, names))


def training_picture(name: str, job: str) -> Picture:
    """Returns the exhibit of the quality over steps, seconds and bytes."""
    return Picture(name, (job,), lambda records, path: converge_report.draw(records[0].results, path))


def training_row(record: Record, method: str) -> TrainingRow:
    """Returns the row of a method, on the only number of hosts."""
    [result] = record.results
    return next(row for row in converge_report.rows_of(result) if row.method == method)


def runs_of(records: Sequence[Record], *hosts: int) -> list[tuple[int, dict[str, Any]]]:
    """Returns the number of hosts and what was measured on them at each ratio, of all or of these numbers of hosts."""
    found = [(result["world_size"], run) for record in records for result in record.results for run in result["runs"]]
    return [(number, run) for number, run in found if not hosts or number in hosts]


def step_row(run: dict[str, Any], name: str) -> StepRow:
    """Returns the row of this name; of a candidate that was measured with several bucket sizes, the fastest."""
    rows = step_report.rows_of(run)
    found = [row for row in rows if row.name == name]
    found = found or [row for row in rows if re.fullmatch(rf"{re.escape(name)}, [\d.]+ MiB", row.name)]
    if not found:
        raise ValueError(f"{name!r} is not among {[row.name for row in rows]}.")
    return min(found, key=lambda row: row.seconds)


def collectives(
    records: Sequence[Record], cell: Callable[[dict[str, Any]], str | None] = time_of, least_bytes: int = 0
) -> str:
    """Returns a row for each operation that has cells, and a column for each number of hosts and size.

    By default they have ms, and in brackets the share of the limit that the bytes alone set.
    """
    [record] = records
    found = [
        (name_of(row), (one["world_size"], row["num_bytes"]), row) for one in record.results for row in one["rows"]
    ]
    cells = {(name, column): cell(row) for name, column, row in found if row["num_bytes"] >= least_bytes}
    columns = dict.fromkeys(column for _, column in cells)
    names = dict.fromkeys(name for (name, _), value in cells.items() if value is not None)
    rows = [[name, *(cells.get((name, column)) or "" for column in columns)] for name in names]
    return table(["", *(f"{hosts} hosts, {size / MIB:.3g} MiB" for hosts, size in columns)], rows)


def cost_of(run: dict[str, Any]) -> StepCost:
    """Returns the parts of a step."""
    return StepCost(**run["cost"])


def span(values: Sequence[float], form: str = ".2f") -> str:
    """Returns the least and the largest of some values."""
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def reported(name: str, job: str) -> Table:
    """Returns the exhibit of the tables that the job's command itself prints."""

    def render(records: Sequence[Record]) -> str:
        [record] = records
        text = command_of(record.command).report(record.results)
        return re.sub(r"^#+ (.*)$", r"**\1**", text, flags=re.MULTILINE)

    return Table(name, (job,), render)


def drawn_by(name: str, job: str, file: str) -> Picture:
    """Returns the exhibit of a picture that the job's command itself draws, as ``file``."""
    return Picture(name, (job,), lambda records, path: redraw(records[0], file, path))
