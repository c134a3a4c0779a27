"""The other ways in which a process ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.quick.faults.test_shutdown import NIGHTLY, assert_ended


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc, where Linux lists threads")
@pytest.mark.parametrize("name", NIGHTLY)
def test_a_process_ends_as_it_should(name: str) -> None:
    assert_ended(name, NIGHTLY)
