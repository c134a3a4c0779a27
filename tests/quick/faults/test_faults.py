"""Each kind of fault once in each framework, and each method killed once: who is lost is named by all others."""

from __future__ import annotations

from functools import cache

import pytest

from tests.conformance.faults import QUICK, Fault, Lost, assert_ended, lose_ranks


@cache
def lost() -> Lost:
    return lose_ranks(QUICK)


@pytest.mark.parametrize("fault", QUICK, ids=str)
def test_all_others_name_the_rank_that_is_lost(fault: Fault) -> None:
    """And all processes end by themselves, as after Ctrl-C, with the exit codes that they should have."""
    assert_ended(lost(), fault)
