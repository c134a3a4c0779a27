"""What the docs show was measured: every table and picture comes from a file, and every file from a command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.results import job as job_module
from benchmarks.results import pages
from benchmarks.results.job import MEASURED, Job, Record
from benchmarks.results.papers import JOBS, PICTURES, TABLES
from benchmarks.results.redraw import command_of
from tests.support.commands import ROOT

DOCS = ROOT / "docs"


SHOWN = pages.pages()


#: The pages that show nothing but what these files have.
WHOLLY_MEASURED = [page for page in (DOCS / "results.md", DOCS / "benchmarks.md") if page in SHOWN]


QUICK = "python -m benchmarks.selsync_overhead --steps 10 --rounds 1"


@pytest.mark.parametrize("page", SHOWN, ids=lambda page: page.stem)
def test_tables_are_what_was_measured(page: Path) -> None:
    text = page.read_text()
    assert text == pages.made_anew(text, TABLES, PICTURES), "run python -m benchmarks.results write"
    for name in pages.places_in(text):
        for job in TABLES[name].jobs:
            is_there = job_module.path_of(job).exists()
            assert JOBS[job].is_measured == is_there, f"{name}: the command of {job} has changed since it was measured"


@pytest.mark.parametrize("page", WHOLLY_MEASURED, ids=lambda page: page.stem)
def test_no_number_in_a_table_is_written_by_hand(page: Path) -> None:
    for line in pages.without_places(page.read_text()).splitlines():
        cells = [cell.strip() for cell in line.split("|")[2:]] if line.startswith("|") else []
        assert not [cell for cell in cells if re.match(r"[+-]?\d", cell)], line


def test_every_file_has_a_job_every_exhibit_its_jobs_and_every_job_options_that_exist() -> None:
    assert {path.stem for path in MEASURED.glob("*.json")} <= set(JOBS)
    for shown in [*TABLES.values(), *PICTURES.values()]:
        assert set(shown.jobs) <= set(JOBS), shown.name
    for job in JOBS.values():
        if "examples/" not in job.command:
            command_of(job.command)


def test_a_job_keeps_what_it_measured_and_one_that_fails_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_module, "MEASURED", tmp_path / "measured")
    monkeypatch.setattr(job_module, "WORK", tmp_path / "work")
    with pytest.raises(RuntimeError, match=r"broken: .*exit status 2.*log\.txt"):
        Job("broken", "python -m benchmarks.selsync_overhead --steps 0", 1).run()
    assert not (tmp_path / "measured").exists()
    assert "steps" in (tmp_path / "work" / "broken" / "log.txt").read_text()
    job = Job("quick", QUICK, 1)
    assert not job.is_measured
    job.run()
    assert job.is_measured
    assert not Job("quick", f"{QUICK} --ranks 8", 1).is_measured  # another command
    record = Record.read("quick")
    assert (record.kind, record.command) == ("selsync_overhead", QUICK)
    assert re.match(r"\d{4}-\d\d-\d\d, version \S+ \(\w+\+?\), torch [\d.]+; \d+ processors", record.provenance)
