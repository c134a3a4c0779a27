"""A rank that hangs is named with its stack, and none outlives the tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.quick.test_harness import lives, misbehave
from tests.support.commands import ROOT, environment
from tests.support.harness import default_signals, launch


def sleep(folder: Path) -> None:
    """Writes down its process. Rank 1 is stopped, so that only the system can end it."""
    (folder / f"{os.getpid()}.rank").touch()
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1000)


def test_a_rank_that_hangs_is_named() -> None:
    with pytest.raises(AssertionError) as caught:
        launch(misbehave, 2, "hangs", timeout_s=20, init=False)
    assert all(word in str(caught.value) for word in ["rank 1 hung", "in misbehave"]), caught.value
    assert "rank 0" not in str(caught.value)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_the_tests(number: signal.Signals, tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from tests.nightly import test_harness as test
from tests.support import harness
harness.launch(test.sleep, 2, Path({str(tmp_path)!r}), init=False)
"""
    command = [sys.executable, "-c", script]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stderr=subprocess.DEVNULL, preexec_fn=default_signals
    )
    try:
        until(lambda: len(list(tmp_path.iterdir())) == 2)
        os.kill(process.pid, number)
        process.wait(200)
    finally:
        process.kill()
        process.wait()
    ranks = [int(file.stem) for file in tmp_path.iterdir()]
    until(lambda: not any(lives(rank) for rank in ranks))


def until(condition: Callable[[], bool], timeout_s: float = 200) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
