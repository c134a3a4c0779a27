"""The jobs that measure what the docs show: each keeps all that it measured, and ends with all its processes."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from benchmarks import results
from benchmarks.results import MEASURED, PICTURES, Job, read_jobs
from tests.quick.docs.test_docs import anchors_of
from tests.support.commands import ROOT

QUICK = "python -m benchmarks.codecs --mib 0.1 --rounds 1"
DOCS = ROOT / "docs"


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folders of the jobs, which are empty."""
    for name in ("MEASURED", "PICTURES", "WORK"):
        monkeypatch.setattr(results, name, tmp_path / name)
    return tmp_path


def test_the_docs_show_each_job() -> None:
    for job in read_jobs():
        page, _, heading = job.shown.partition("#")
        assert not heading or heading in anchors_of(DOCS / page), job.name
        assert all((PICTURES / f"{name}.png").exists() for name in job.pictures), job.name


def test_the_docs_link_to_each_file() -> None:
    text = "".join(page.read_text() for page in [ROOT / "README.md", *DOCS.glob("*.md")])
    for path in [*MEASURED.iterdir(), *PICTURES.iterdir()]:
        assert f"{path.parent.name}/{path.name})" in text, path.name


def test_a_job_keeps_what_it_measured_and_one_that_fails_nothing(folders: Path) -> None:
    with pytest.raises(RuntimeError, match=r"broken: .*exit status 2.*log\.txt"):
        Job(name="broken", command="python -m benchmarks.codecs --rounds 0", minutes=1, shown="").run()
    assert not (folders / "MEASURED").exists()
    assert "rounds" in (folders / "WORK" / "broken" / "log.txt").read_text()
    job = Job(name="quick", command=QUICK, minutes=1, shown="")
    assert not job.is_measured
    job.run()
    assert job.is_measured
    assert not Job(name="quick", command=f"{QUICK} --threads 2", minutes=1, shown="").is_measured
    record = json.loads(job.path.read_text())
    assert [*record] == ["command", "measured", "kind", "table", "results"]
    assert {"time", "python", "versions", "machine", "cpus", "commit", "minutes"} <= {*record["measured"]}
    assert any(line.startswith("| int8 |") for line in record["table"])


@pytest.mark.usefixtures("folders")
def test_jobs_are_listed_and_none_begins_that_has_no_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ("list --only codecs overhead", "measure --only codecs --minutes 0.01"):
        monkeypatch.setattr(sys, "argv", ["results", *words.split()])
        assert results.main() == 0
    said = capsys.readouterr().out
    assert "3 jobs, 7 minutes; 7 are left." in said
    assert "benchmarks.md#codecs" in said
    assert "1 of 1" not in said
    with pytest.raises(ValueError, match="only='codex' is not the beginning"):
        results.chosen(("codex",))


def test_no_process_outlives_the_time_limit_of_a_job(folders: Path) -> None:
    """Otherwise ranks would disturb the next measurement."""
    command = f"bash -c 'sleep 600 & echo $! > {folders}/pid; wait'"
    (folders / "job").mkdir()
    with pytest.raises(RuntimeError, match="slow: not finished after"):
        Job(name="slow", command=command, minutes=1, shown="")._run_command(folders / "job", limit_s=1)
    pid = int((folders / "pid").read_text())
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and Path(f"/proc/{pid}").exists():
        if " Z " in Path(f"/proc/{pid}/stat").read_text():  # ended; init has yet to reap it
            break
        time.sleep(0.1)
    else:
        assert not Path(f"/proc/{pid}").exists()
