"""The summary of a drill: a table, all records as JSON, and a picture of methods by faults."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_pipesync.lab.bench.pictures import COLOURS, picture
from lightning_pipesync.lab.bench.tables import environment, show, table, write_results
from tests.drill.case import FRAMEWORKS
from tests.drill.faults import FAULTS, JOBS
from tests.drill.verdict import ENDED, FAILED, NOT_FIRED, SKIPPED, SURVIVED, VERDICTS

Record = Mapping[str, Any]

#: The colour of each verdict.
OF_VERDICTS = {
    SURVIVED: COLOURS[3],
    ENDED: COLOURS[6],
    FAILED: COLOURS[2],
    NOT_FIRED: COLOURS[5],
    SKIPPED: "#BBBBBB",
}
#: Of all verdicts in a cell of the picture, the one whose colour it has.
_WORST = (FAILED, NOT_FIRED, ENDED, SURVIVED, SKIPPED)


def as_markdown(records: Sequence[Record]) -> str:
    """Returns the tables: verdicts by fault, and by method and framework, and a line for each case that has failed."""
    by_fault: dict[str, Counter[str]] = {name: Counter() for name in FAULTS}
    for record in records:
        for strike in record["faults"]:
            by_fault[strike["fault"]][record["verdict"]] += 1
    rows = [(name, counts) for name, counts in by_fault.items() if counts]
    total = Counter(record["verdict"] for record in records)
    text = table(
        ["fault", *VERDICTS],
        [
            [name, *(str(counts[verdict] or "") for verdict in VERDICTS)]
            for name, counts in [*rows, ("all trainings", total)]
        ],
    )
    text += "\n" + by_method(records)
    remarkable = [record for record in records if record["verdict"] in (FAILED, NOT_FIRED)]
    if remarkable:
        names = ("seed", "method", "framework", "verdict")
        cells = [[*(str(record[name]) for name in names), described(record), why(record)] for record in remarkable]
        text += "\n" + table([*names, "faults", "why"], cells)
    return text


def by_method(records: Sequence[Record]) -> str:
    """Returns a table of methods by frameworks; a cell has how many survived, ended, and are neither."""
    cells: dict[str, dict[str, Counter[str]]] = {}
    for record in records:
        cells.setdefault(trained(record), {}).setdefault(record["framework"], Counter())[record["verdict"]] += 1
    frameworks = [name for name in FRAMEWORKS if any(name in of for of in cells.values())]

    def cell(counts: Counter[str]) -> str:
        others = counts.total() - counts[SURVIVED] - counts[ENDED] - counts[SKIPPED]
        return f"{counts[SURVIVED]} / {counts[ENDED]} / {others}"

    rows = [
        [name, *(cell(of[each]) if each in of else "" for each in frameworks)] for name, of in sorted(cells.items())
    ]
    return table([f"{SURVIVED} / {ENDED} / {FAILED} or {NOT_FIRED}", *frameworks], rows)


def trained(record: Record) -> str:
    """Returns which method trained."""
    return f"{record['method']}, as jobs" if record["subject"] == JOBS else str(record["method"])


def described(record: Record) -> str:
    """Returns the faults of a case, in a line."""
    of = "job" if record["subject"] == JOBS else "rank"
    return ", ".join(
        f"{strike['fault']} of {of} {strike['rank']} of {record['ranks']} ({strike['phase']})"
        for strike in record["faults"]
    )


def why(record: Record, most: int = 160) -> str:
    """Returns why a case has its verdict, in a cell of a table."""
    text = " ".join(str(record["why"]).split()).replace("|", "/")
    return text if len(text) <= most else f"...{text[-most:]}"


def report(records: Sequence[Record], folder: Path) -> None:
    """Writes ``drill.json``, ``drill.md`` and ``drill.png``, and prints the tables."""
    text = as_markdown(records)
    write_results(folder, "drill", {"kind": "drill", "environment": environment(), "results": list(records)}, text)
    draw(records, folder / "drill.png")
    show(text)


def draw(records: Iterable[Record], path: Path) -> None:
    """Draws methods by faults: a cell has the colour of its worst verdict, and the number of its trainings."""
    cells: dict[tuple[str, str], Counter[str]] = {}
    for record in records:
        for strike in record["faults"]:
            cells.setdefault((trained(record), strike["fault"]), Counter())[record["verdict"]] += 1
    methods = sorted({method for method, _ in cells})
    faults = [name for name in FAULTS if any(fault == name for _, fault in cells)]
    size = (2.5 + 0.5 * len(faults), 2.2 + 0.45 * len(methods))
    with picture(path, size, legend="below", legend_columns=len(VERDICTS), patches=OF_VERDICTS) as panels:
        panel = panels[0, 0]
        for (method, fault), counts in cells.items():
            worst = next(verdict for verdict in _WORST if counts[verdict])
            left, bottom = faults.index(fault), methods.index(method)
            panel.bar(left, 0.9, 0.9, bottom - 0.45, color=OF_VERDICTS[worst])
            shown = f"{counts[worst]} of {counts.total()}" if counts[worst] < counts.total() else f"{counts.total()}"
            panel.text(left, bottom, shown, ha="center", va="center", fontsize="x-small")
        panel.set_xticks(range(len(faults)), faults, rotation=45, ha="right", fontsize="small")
        panel.set_yticks(range(len(methods)), methods, fontsize="small")
        panel.set_xlim(-0.6, len(faults) - 0.4)
        panel.set_ylim(len(methods) - 0.4, -0.6)


def read_records(files: Iterable[Path]) -> list[Record]:
    return [json.loads(file.read_text()) for file in files]
