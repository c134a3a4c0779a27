"""The other ways in which a process ends; and what torchrun says last of a loop in which a rank raises."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.quick.faults.test_shutdown import LOOP, NIGHTLY, assert_ended, assert_torchrun_names_the_rank_at_fault


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc, where Linux lists threads")
@pytest.mark.parametrize("name", NIGHTLY)
def test_a_process_ends_as_it_should(name: str) -> None:
    assert_ended(name, NIGHTLY)


def test_the_last_lines_of_torchrun_name_the_rank_at_fault(tmp_path: Path) -> None:
    assert_torchrun_names_the_rank_at_fault(LOOP, tmp_path)
