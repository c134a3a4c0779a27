"""The rest of the table of faults: all methods on all frameworks, at all places, and three ranks that wait in turns."""

from __future__ import annotations

from functools import cache

import pytest

from tests.conformance.faults import NIGHTLY, Fault, Lost, assert_ended, lose_ranks


@cache
def lost() -> Lost:
    return lose_ranks(NIGHTLY)


@pytest.mark.parametrize("fault", NIGHTLY, ids=str)
def test_all_others_name_the_rank_that_is_lost(fault: Fault) -> None:
    """And all processes end by themselves, as after Ctrl-C, with the exit codes that they should have."""
    assert_ended(lost(), fault)
