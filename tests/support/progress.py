"""What a run of the tests says: a line for each file, the slowest ten, and what it has left to other commands."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


class Progress:
    """A plugin of pytest, for the process that reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._plugins = config.pluginmanager
        self._paths = {Path(path).as_posix().rstrip("/") for path in config.args}
        self._left: Counter[str] = Counter()
        self._seconds: Counter[str] = Counter()
        self._outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._slow: Counter[str] = Counter()

    def _reporter(self) -> Any:
        return self._plugins.get_plugin("terminalreporter")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._expect([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: list[str]) -> None:
        self._expect(ids)

    def _expect(self, ids: list[str]) -> None:
        if not self._left:
            self._left.update(map(file_of, ids))

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Shows no letter for each test."""
        category = outcome(report)
        return None if category is None else (category, "", "")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file, category = file_of(report.nodeid), outcome(report)
        self._seconds[file] += report.duration
        self._slow[report.nodeid] += report.duration
        if category:
            self._outcomes[file][category] += 1
        if category in ("failed", "error"):
            why = report.longreprtext.strip().splitlines()[-1:]
            self._reporter().write_line(f"FAILED {report.nodeid}: {''.join(why)[:200]}", red=True)
        if report.when == "teardown":
            self._left[file] -= 1
            if self._left[file] == 0:
                counts = ", ".join(f"{number} {category}" for category, number in sorted(self._outcomes[file].items()))
                self._reporter().write_line(f"{self._seconds[file]:6.1f} s  {file}: {counts}")

    def pytest_terminal_summary(self) -> None:
        if len(self._outcomes) > 1:
            self._reporter().section("slowest ten; run one again by: python -m pytest 'ID'")
            for test, seconds in self._slow.most_common(10):
                self._reporter().write_line(f"{seconds:6.1f} s  {test}")

    def pytest_unconfigure(self) -> None:
        if "tests/quick" in self._paths and "tests/nightly" not in self._paths:
            folders = Counter(path.parent.name for path in (ROOT / "tests/nightly").rglob("test_*.py"))
            others = ", ".join(f"{folder} {number}" for folder, number in sorted(folders.items()))
            print(f"Left to make test-all: {folders.total()} files ({others}); beside it: test-kernels, -cuda, fuzz.")


def file_of(test: str) -> str:
    return test.partition("::")[0]


def outcome(report: pytest.TestReport) -> str | None:
    """Returns what becomes of a test by a report; None: nothing yet."""
    if report.when == "call":
        return report.outcome
    if report.failed:
        return "error"
    return "skipped" if report.skipped else None
