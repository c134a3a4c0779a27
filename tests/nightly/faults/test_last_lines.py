"""Wherever a rank is lost, the output of every other one ends with the line that names it, in each framework."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.nightly.faults.last_lines import FROZEN_TIMEOUT_S, TIMEOUT_S, VICTIM, Job
from tests.support.harness import default_signals

#: What the last line says.
HOW = {
    "killed": "has died",
    "frozen": "is frozen",
    "raises": "it raised KeyError: 'a bug in the loop'",
    "exits": "it has ended without an error",
}
EXIT_CODES = {"killed": -signal.SIGKILL, "frozen": -signal.SIGKILL, "raises": 1, "exits": 0}

#: The framework, the place where rank 1 is lost, and how. Each place and each kind of fault is in a framework at least.
JOBS = [
    "plain attach killed",
    "plain step exits",
    "plain flush raises",
    "plain barrier killed",
    "plain barrier frozen",
    "sharded forward raises",
    "sharded backward killed",
    "sharded backward frozen",
    "fabric init raises",
    "fabric barrier frozen",
    "fabric checkpoint killed",
    "accelerate init raises",
    "accelerate gather killed",
    "accelerate raw raises",
    "accelerate raw frozen",
    "lightning init killed",
    "lightning validation frozen",
    "lightning checkpoint raises",
    "transformers step killed",
    "transformers validation raises",
]
#: Whose own errors say it, to who catches them: those of a collective that the loop calls itself do not.
CAUGHT = [name for name in JOBS if name.split()[:2] not in (["plain", "barrier"], ["accelerate", "raw"])]


@cache
def outputs() -> tuple[dict[str, int], dict[str, str]]:
    """Returns the exit codes, and what ranks have printed or written down, by job and rank."""
    with TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "tests.nightly.faults.last_lines", directory, "7", *JOBS]
        process = subprocess.run(command, capture_output=True, text=True, timeout=800, preexec_fn=default_signals)
        assert process.returncode == 0, process.stderr
        texts = {file.name: file.read_text() for file in Path(directory).glob("* * *") if file.is_file()}
        return json.loads((Path(directory) / "codes").read_text()), texts


def assert_names_it(line: str, name: str) -> None:
    how = Job.of(name).how
    assert re.search(rf"Rank {VICTIM} \(host \S+, pid \d+\) is at fault: ", line), line
    assert HOW[how] in line, line
    assert f"timeout_s={FROZEN_TIMEOUT_S if how == 'frozen' else TIMEOUT_S}" in line, line


@pytest.mark.parametrize("name", JOBS)
def test_the_output_ends_with_the_rank_that_is_lost(name: str) -> None:
    codes, texts = outputs()
    job = Job.of(name)
    assert codes[f"{name} {VICTIM}"] == EXIT_CODES[job.how], texts[f"{name} {VICTIM}"]
    for rank in set(range(job.ranks)) - {VICTIM}:
        output = texts[f"{name} {rank}"]
        assert codes[f"{name} {rank}"] == 1, output
        assert_names_it(output.rstrip().splitlines()[-1], name)


@pytest.mark.parametrize("name", CAUGHT)
def test_the_error_ends_with_it_where_it_is_caught(name: str) -> None:
    _, texts = outputs()
    for rank in set(range(Job.of(name).ranks)) - {VICTIM}:
        assert_names_it(texts[f"{name} {rank} error"].splitlines()[-1], name)
