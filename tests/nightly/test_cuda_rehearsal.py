"""``python -m tests.cuda`` without a GPU, and without a network: every stage begins, and what has ended stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lightning_pipesync.lab.netlab.network import IN_USER_NAMESPACE
from tests.cuda.__main__ import STAGES
from tests.support.harness import HANGS_S, default_signals

#: A namespace has a loopback interface, which is down.
LOOPBACK_UP = """
import fcntl, os, socket, struct, sys
up_and_running, set_flags = 0x41, 0x8914
fcntl.ioctl(socket.socket(), set_flags, struct.pack("16sh", b"lo", up_and_running))
os.execv(sys.argv[1], sys.argv[1:])
"""
#: In a namespace without a network, in which a network may be emulated.
ALONE = ["unshare", "--net"] if os.geteuid() == 0 else IN_USER_NAMESPACE
#: Three minutes on two cores; more on a busy machine.
SECONDS = 500
#: Stages in which a CPU does nothing.
LEFT_OUT = {"two ranks over NCCL"}


@contextmanager
def started(output: Path) -> Iterator[subprocess.Popen[str]]:
    """Context in which it runs; it is killed at the end, and its stages with it."""
    wheels = ["--wheels", os.environ["WHEELS"]] if "WHEELS" in os.environ else []
    command = [sys.executable, "-m", "tests.cuda", "--output", str(output), "--seconds", str(SECONDS), *wheels]
    process = subprocess.Popen(
        [*ALONE, sys.executable, "-c", LOOPBACK_UP, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=default_signals,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def lines_of(output: Path) -> list[dict[str, Any]]:
    """Returns what was recorded, in whole lines."""
    texts = [file.read_text() for file in sorted(output.glob("*.jsonl"))]
    return [json.loads(line) for text in texts for line in text.splitlines() if line.endswith("}")]


def test_a_rehearsal_that_is_cut_off_goes_on(tmp_path: Path) -> None:
    if subprocess.run([*ALONE, "true"], check=False).returncode:
        pytest.skip("the kernel makes no network namespace for this user")
    with started(tmp_path) as first:
        began = time.monotonic()
        while Counter(line["outcome"] for line in lines_of(tmp_path))["passed"] < 730:  # within the methods
            assert first.poll() is None, first.communicate()[0]
            assert time.monotonic() - began < HANGS_S
            time.sleep(0.1)
        first.terminate()
        said = first.communicate(timeout=30)[0]
    kept = lines_of(tmp_path)
    assert "| faults | 0 | 0 | 0 | 0 | not yet run |" in said
    with started(tmp_path) as second:
        said = second.communicate(timeout=SECONDS)[0]
    print(said)
    assert second.returncode == 0, said
    tests = Counter(line["test"] for line in lines_of(tmp_path))
    assert set(tests.values()) == {1}, "what had ended did not run again"
    assert {line["test"] for line in kept} < tests.keys()
    summary = json.loads((tmp_path / "summary.json").read_text())
    for stage in STAGES:
        outcomes = Counter(row["outcome"] for row in summary[stage.name]["tests"])
        assert summary[stage.name]["ended"] == "complete"
        assert outcomes["failed"] == 0
        assert bool(outcomes["passed"]) == (stage.name not in LEFT_OUT)
    figures = {name for row in summary["measurements"]["tests"] for name in row["figures"]}
    assert "plan" in figures
    assert "transformer on ranks that share the device, 1gbit" in figures
