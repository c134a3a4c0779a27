"""What `launch` says of ranks that do not return, which ranks `on_ranks` keeps, and that none outlives the tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.commands import ROOT, environment
from tests.support.harness import DIED, HANGS_S, default_signals, launch, on_ranks


def sum_of_ranks() -> float:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return float(total)


def misbehave(how: str) -> None:
    if os.environ["RANK"] == "0":
        return
    if how == "raises":
        raise KeyError("of rank 1")
    if how == "dies":
        os._exit(3)
    time.sleep(1000)


def sleep(folder: Path) -> None:
    """Writes down its process. Rank 1 is stopped, so that only the system can end it."""
    (folder / f"{os.getpid()}.rank").touch()
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1000)


def test_results_are_by_rank() -> None:
    assert launch(sum_of_ranks, 3) == [3.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raises", ["rank 1 raised", "KeyError: 'of rank 1'", "in misbehave"]),
        ("dies", ["rank 1 died with exit code 3"]),
        ("hangs", ["rank 1 hung", "in misbehave"]),
    ],
)
def test_a_rank_that_does_not_return_is_named(how: str, words: list[str]) -> None:
    with pytest.raises(AssertionError) as caught:
        # Without a process group, whose connections rank 0 may still make when rank 1 dies.
        launch(misbehave, 2, how, timeout_s=20 if how == "hangs" else HANGS_S, init=False)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "rank 0" not in str(caught.value)


def test_a_rank_may_be_expected_to_die() -> None:
    assert launch(misbehave, 2, "dies", may_die=(1,), init=False) == [None, DIED]


def test_ranks_are_kept_until_one_fails() -> None:
    first = on_ranks(os.getpid, 2)
    assert on_ranks(os.getpid, 2) == first
    assert on_ranks(sum_of_ranks, 2) == [1.0, 1.0]
    with pytest.raises(AssertionError, match="rank 1 raised"):
        on_ranks(misbehave, 2, "raises")
    assert not any(map(lives, first))
    assert not set(on_ranks(os.getpid, 2)) & set(first)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_the_tests(number: signal.Signals, tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from tests.quick import test_harness as test
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


def lives(pid: int) -> bool:
    """Whether a process is there, and not only its status, which nobody has asked for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False
