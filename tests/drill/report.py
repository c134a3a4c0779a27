"""The summary of a drill: verdicts by fault, the trainings that have failed, and all records as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_pipesync.lab.bench.tables import environment, show, table, write_results
from tests.drill.faults import FAULTS
from tests.drill.verdict import FAILED, NOT_FIRED, VERDICTS

Record = Mapping[str, Any]
#: Characters of a reason in a cell of a table: the last ones.
MOST = 160


def report(records: Sequence[Record], folder: Path) -> None:
    """Writes ``drill.json`` and ``drill.md``, and prints the tables."""
    text = as_markdown(records)
    write_results(folder, "drill", {"kind": "drill", "environment": environment(), "results": list(records)}, text)
    show(text)


def as_markdown(records: Sequence[Record]) -> str:
    """Returns a table of verdicts by fault, and one with a line for each training that has failed."""
    by_fault: dict[str, Counter[str]] = {name: Counter() for name in FAULTS}
    for record in records:
        for strike in record["faults"]:
            by_fault[strike["fault"]][record["verdict"]] += 1
    rows = [(name, counts) for name, counts in by_fault.items() if counts]
    rows.append(("all trainings", Counter(record["verdict"] for record in records)))
    text = table(["fault", *VERDICTS], [[name, *(str(counts[one] or "") for one in VERDICTS)] for name, counts in rows])
    names = ("seed", "method", "framework", "subject", "fault", "verdict")
    failed = [
        [*(str(record[name]) for name in names), " ".join(str(record["why"]).split()).replace("|", "/")[-MOST:]]
        for record in records
        if record["verdict"] in (FAILED, NOT_FIRED)
    ]
    return text + "\n" + table([*names, "why"], failed) if failed else text
