"""A rank that is lost within a step makes the other one raise, and Ctrl-C ends all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.conformance.cases import PAIRS
from tests.conformance.faults import HANG_TIMEOUT_S, HUNG_S, TIMEOUT_S, WAVES
from tests.conformance.methods import METHODS
from tests.support.harness import default_signals

#: What the last line of the other rank's error says of the one that is lost.
HOW = {
    "killed": "has died",
    "hangs": "is alive, and has not joined",
    "raises": "raised KeyError: 'a bug in the loop'",
}

PLAIN = [pair for pair in PAIRS if pair[0] == "plain"]
#: What a framework makes of an exception does not depend on the method, except that it is a pipeline or not.
REPRESENTATIVES = {(framework, METHODS[name].pipeline): (framework, name) for framework, name in reversed(PAIRS)}
RAISING = sorted({*PLAIN, *REPRESENTATIVES.values()})
#: A rank that hangs is found out by its timeout, whatever the framework; a Trainer then saves a checkpoint.
JOBS = {
    how: [" ".join((how, *pair)) for pair in pairs]
    for how, pairs in {
        "killed": PAIRS,
        "hangs": [*PLAIN, ("lightning", "selsync")],
        "raises": RAISING,
        "interrupted": RAISING,
    }.items()
}


@dataclass
class Lost:
    """What became of the ranks.

    Attributes:
        output: what they have printed: their stacks, if they hung.
        codes: with which they ended, by job and rank; empty if some have not.
        errors: what they raised, likewise: type and message.
    """

    output: str
    codes: dict[str, int]
    errors: dict[str, tuple[str, str]]


@cache
def lose_ranks() -> Lost:
    """Runs all jobs."""
    with TemporaryDirectory() as directory:
        folder = Path(directory)
        with (folder / "output").open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.conformance.faults", directory, *chain(*JOBS.values())],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=default_signals,
            )
        deadline = time.monotonic() + len(WAVES) * HUNG_S
        while len(list(folder.glob("* waits"))) < len(JOBS["interrupted"]) and time.monotonic() < deadline:
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        with suppress(subprocess.TimeoutExpired):
            process.wait(HUNG_S)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        codes = folder / "exit codes"
        return Lost(
            (folder / "output").read_text(),
            json.loads(codes.read_text()) if codes.exists() else {},
            {file.name: json.loads(file.read_text()) for file in folder.glob("* [01]")},
        )


@pytest.mark.parametrize("job", chain(*(JOBS[how] for how in HOW)))
def test_a_lost_rank_makes_the_other_raise(job: str) -> None:
    """And its process ends by itself; long before the timeout, of which HUNG_S is a part, unless the peer is alive."""
    lost, how = lose_ranks(), job.split()[0]
    assert f"{job} 0" in lost.errors, lost.output
    kind, message = lost.errors[f"{job} 0"]
    assert kind == "RuntimeError", message
    last = message.splitlines()[-1]
    assert last.startswith("Rank 1 (host "), message
    assert HOW[how] in last, message
    assert f"timeout_s={HANG_TIMEOUT_S if how == 'hangs' else TIMEOUT_S}" in last, message
    assert lost.codes[f"{job} 0"] == 1, lost.output
    assert lost.codes[f"{job} 1"] == (-signal.SIGKILL if how == "killed" else 1), lost.output


@pytest.mark.parametrize("job", JOBS["interrupted"])
def test_an_interrupt_ends_all_ranks(job: str) -> None:
    """Also one that waits for another. Gloo may still abort it while the interpreter shuts down, seldom."""
    lost = lose_ranks()
    for rank in (0, 1):
        code = lost.codes.get(f"{job} {rank}")
        assert code in (1, -signal.SIGINT, *([-signal.SIGABRT] if rank == 0 else [])), lost.output
