"""What the docs show was measured: every table and picture comes from a file, and every file from a command."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.results import job as job_module
from benchmarks.results import pages
from benchmarks.results.command import Measure
from benchmarks.results.exhibit import Claim, Claims, Finding, Picture, Shown, Table, not_measured
from benchmarks.results.job import MEASURED, Job, Record
from benchmarks.results.papers import JOBS, PICTURES, TABLES
from benchmarks.results.redraw import command_of
from benchmarks.results.views import reachable
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


@pytest.mark.parametrize("page", WHOLLY_MEASURED, ids=lambda page: page.stem)
def test_pictures_show_what_was_measured(page: Path) -> None:
    text = page.read_text()
    assert not re.findall(r"!\[.*", pages.without_places(text))
    for name in pages.pictures_in(text):
        picture = PICTURES[name]
        assert not_measured(picture.jobs) or picture.is_drawn, f"{name}: run python -m benchmarks.results write"


def test_every_file_has_a_job_and_every_exhibit_its_jobs() -> None:
    assert {path.stem for path in MEASURED.glob("*.json")} <= set(JOBS)
    for shown in [*TABLES.values(), *PICTURES.values()]:
        assert set(shown.jobs) <= set(JOBS), shown.name


@pytest.mark.parametrize("name", [name for name, job in JOBS.items() if "examples/" not in job.command])
def test_the_command_of_a_job_has_options_that_exist(name: str) -> None:
    command_of(JOBS[name].command)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of that of the docs."""
    monkeypatch.setattr(job_module, "MEASURED", tmp_path / "measured")
    monkeypatch.setattr(job_module, "WORK", tmp_path / "work")
    return tmp_path / "measured"


def test_a_job_keeps_what_it_measured(measured: Path) -> None:
    job = Job("quick", QUICK, 1)
    assert not job.is_measured
    job.run()
    assert job.is_measured
    assert not Job("quick", f"{QUICK} --ranks 8", 1).is_measured  # another command
    record = Record.read("quick")
    assert (record.kind, record.command) == ("selsync_overhead", QUICK)
    assert record.results[0]["windows"][0]["window"] == 25
    assert re.match(r"\d{4}-\d\d-\d\d, version \S+ \(\w+\+?\), torch [\d.]+; \d+ processors", record.provenance)
    lines = (measured / "quick.json").read_text().splitlines()
    assert len(lines) > 10  # so that a change can be read
    assert max(len(digits) for digits in re.findall(r"\d\.(\d+)", "\n".join(lines))) < 12


@pytest.mark.parametrize(("options", "reason"), [("--steps 0", "exit status 2"), ("--help", "0 results")])
def test_a_job_that_fails_keeps_nothing(measured: Path, options: str, reason: str) -> None:
    with pytest.raises(RuntimeError, match=rf"broken: .*{reason}.*log\.txt"):
        Job("broken", f"python -m benchmarks.selsync_overhead {options}", 1).run()
    assert not measured.exists()
    log = measured.parent / "work" / "broken" / "log.txt"
    assert "steps" in log.read_text()


def test_measuring_goes_on_where_it_stopped(
    measured: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [Job("done", QUICK, 1), Job("broken", "python -m benchmarks.codecs --mib 0", 1), Job("long", QUICK, 60)]
    jobs.append(Job("left", QUICK, 1))
    monkeypatch.setattr("benchmarks.results.command.JOBS", {job.name: job for job in jobs})
    monkeypatch.setattr(pages, "write", lambda *exhibits: None)
    jobs[0].run()
    before = (measured / "done.json").stat().st_mtime_ns
    assert Measure(minutes=10).run() == 1
    assert (measured / "done.json").stat().st_mtime_ns == before
    assert sorted(path.stem for path in measured.glob("*.json")) == ["done", "left"]
    assert "broken: exit status 2" in capsys.readouterr().out
    with pytest.raises(ValueError, match="only='lost' is not the beginning of a job's name"):
        Measure(only=("lost",))


def test_a_page_gets_its_tables(measured: Path) -> None:
    measured.mkdir()
    record = {"command": QUICK, "kind": "k", "results": [{"value": 4.0, "settings": {"seeds": [0, 1]}}]}
    machine = {"time": "2026-01-02T03:04:05", "commit": "abc", "cpus": 2, "machine": "x86_64"}
    versions = {"torch": "2.13.0+cpu", "lightning-pipesync": "1.0"}
    (measured / "job.json").write_text(json.dumps({**record, "measured": {**machine, "versions": versions}}))

    def finding(records: object) -> Finding:
        return Finding("four", [True, False])

    def draw(records: object, path: Path) -> None:
        raise AssertionError("only when it is written")

    tables: dict[str, Shown] = {
        "values": Table("values", ("job",), lambda records: f"| {records[0].results[0]['value']:g} |"),
        "claims": Claims(
            "claims", (Claim("Fig. 1", "five", ("job",), finding), Claim("Fig. 2", "six", ("absent",), finding))
        ),
        "never": Table("never", ("absent",), lambda records: ""),
    }
    pictures = {name: Picture(name, (job,), draw) for name, job in (("drawn", "job"), ("missing", "absent"))}
    page = "before\n<!-- result: values -->\nold\n<!-- end of result -->\nafter\n<!-- result: claims -->\n" + pages.END
    made = pages.made_anew(page, tables, pictures)
    assert "\nold\n" not in made
    assert f"```bash\n{QUICK}\n```\n\n| 4 |" in made
    origin = "2026-01-02, version 1.0 (abc), torch 2.13.0; 2 processors (x86_64); seeds 0, 1"
    assert f"*Measured {origin}.*" in made
    assert "| Fig. 1 | five | four | in part |\n| Fig. 2 | six | Not measured yet |  |" in made
    assert pages.made_anew(made, tables, pictures) == made
    assert pages.without_places(made) == "before\n\nafter\n"
    shown = pages.made_anew(f"<!-- picture: drawn, A, b -->\n{pages.END}", tables, pictures)
    assert shown == f"<!-- picture: drawn, A, b -->\n\n![A, b](pictures/drawn.png)\n\n{pages.END}"
    assert pages.made_anew(shown, tables, pictures) == shown
    assert "![" not in pages.made_anew(shown.replace("drawn", "missing"), tables, pictures)
    never = pages.made_anew(page.replace("claims", "never"), tables, pictures)
    assert "*Not measured yet: `python -m benchmarks.results measure --only absent`*" in never
    with pytest.raises(ValueError, match="'other' is not the name of a result; there are values, claims, never"):
        pages.made_anew(page.replace("claims", "other"), tables, pictures)


@pytest.mark.parametrize(
    ("qualities", "is_higher", "target", "expected"),
    [
        ([(90.0, 98.5), (97.0, 99.0)], True, 98, 98),  # all seeds reach it
        ([(90.0, 98.5), (96.66, 95.0)], True, 98, 96.6),  # what the second seed has reached at best
        ([(8.0, 5.91), (7.0, 5.2)], False, 5, 6.0),
    ],
)
def test_a_target_that_the_baseline_reaches(
    qualities: list[tuple[float, ...]], is_higher: bool, target: float, expected: float
) -> None:
    others = [{"method": "selsync", "points": [{"quality": 0.0}]}]
    runs = [{"method": "ddp", "points": [{"quality": one} for one in curve]} for curve in qualities]
    result = {"higher_is_better": is_higher, "target": target, "runs": [*others, *runs]}
    assert reachable(result)["target"] == expected
