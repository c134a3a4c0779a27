"""What a run on a GPU keeps: a line for each test as soon as it has ended, from which a later run goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="file of JSON lines, one for each test; what passed is left out again")


def pytest_configure(config: pytest.Config) -> None:
    record: Path | None = config.getoption("--record")
    if record is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(record))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what has passed or was skipped, and puts what has failed last; ranks train for tests of one group."""
    record: Path | None = config.getoption("--record")
    outcomes = {} if record is None else {row["test"]: row["outcome"] for row in read(record)}
    done = [item for item in items if outcomes.get(item.nodeid, "failed") != "failed"]
    config.hook.pytest_deselected(items=done)
    items[:] = sorted((item for item in items if item not in done), key=lambda item: item.nodeid in outcomes)
    for item in items if config.pluginmanager.hasplugin("xdist") else ():
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        group = params.get("framework", params.get("name", ""))
        item.add_marker(pytest.mark.xdist_group(f"{item.path.stem} {group}"))


def read(record: Path) -> list[dict[str, object]]:
    """Returns what was recorded of each test, the last time that it ran; the last line may be cut off."""
    rows: dict[str, dict[str, object]] = {}
    for line in record.read_text().splitlines() if record.exists() else ():
        if line.endswith("}"):
            row = json.loads(line)
            rows[row["test"]] = row
    return list(rows.values())


class Recorder:
    """A plugin for the process that reports."""

    def __init__(self, record: Path) -> None:
        self._record = record

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed and report.when != "call":
            return
        longrepr = report.longrepr
        why = longrepr[2] if isinstance(longrepr, tuple) else report.longreprtext.strip()
        row = {
            "test": report.nodeid,
            "outcome": report.outcome,
            "seconds": round(report.duration, 2),
            "figures": dict(report.user_properties),
            "why": why.removeprefix("Skipped: ") if report.skipped else why[-2000:],
        }
        with self._record.open("a") as file:
            file.write(json.dumps(row) + "\n")
