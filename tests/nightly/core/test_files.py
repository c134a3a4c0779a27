"""Files that a full disk interrupts are whole, or not there; one that has changed since torch wrote it is refused."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_pipesync.accelerate.checkpoint import save_rank_state
from lightning_pipesync.core.files import check_undamaged
from lightning_pipesync.lab.bench.tables import write_results
from tests.support.case_table import launch_cases

#: Bytes after which the disk is full.
LIMIT = 100_000


@contextmanager
def full_disk() -> Iterator[None]:
    """Context manager in which no file of this process can grow beyond some bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def write_states(folder: Path, size: int) -> None:
    save_rank_state(folder, {"x": torch.ones(size)}, "dear", 0, {}, [torch.nn.Linear(1, 1)])


def write_report(folder: Path, size: int) -> None:
    write_results(folder, "report", {"values": [1.0] * size}, "x" * size)


WRITERS: dict[str, Any] = {"states": write_states, "results": write_report}


def interrupt(name: str, folder: Path) -> tuple[dict[str, bytes], dict[str, bytes], str]:
    """Returns the files before and after a write that a full disk interrupts, and its error."""
    write = WRITERS[name]
    write(folder, 3)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    error = ""
    with full_disk():
        try:
            write(folder, 50_000)
        except (OSError, RuntimeError) as raised:
            error = str(raised)
    return before, {path.name: path.read_bytes() for path in folder.iterdir()}, error


@pytest.mark.skipif(os.name != "posix", reason="limits the sizes of files")
def test_a_full_disk_leaves_the_file_before(tmp_path: Path) -> None:
    for name in WRITERS:
        (tmp_path / name).mkdir()
    outcomes = launch_cases({name: partial(interrupt, name, tmp_path / name) for name in WRITERS}, 1)
    for name in WRITERS:
        [(before, after, error)] = outcomes[name]
        assert error
        assert before
        assert after == before


def test_a_file_that_has_changed_is_refused(tmp_path: Path) -> None:
    """torch loads it as it is."""
    file = tmp_path / "a.ckpt"
    torch.save({"x": torch.zeros(1000)}, file)
    check_undamaged(file)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert torch.load(file, weights_only=True)["x"].count_nonzero() == 1
    with pytest.raises(ValueError, match=r"checkpoint .*a\.ckpt is damaged: .*data/0 .* Resume from an earlier"):
        check_undamaged(file)
    check_undamaged(tmp_path / "missing.ckpt")  # what has no checksums is not checked
    check_undamaged("s3://bucket/a.ckpt")
    file.write_text("no archive")
    check_undamaged(file)
