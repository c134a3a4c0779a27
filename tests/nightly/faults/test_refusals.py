"""What else cannot be trained, or resumed from, is refused on all ranks, by name."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.conformance.refusals import (
    DAMAGED,
    Row,
    all_refused,
    assert_damaged_is_refused,
    assert_refused_by_name,
    rows,
)
from tests.support.case_table import Outcomes

ROWS = rows(quick=False)


@cache
def outcomes(framework: str) -> Outcomes:
    return all_refused(framework, ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row))
def test_is_refused_by_name(row: Row) -> None:
    assert_refused_by_name(outcomes(row[0])[row], row)


@pytest.mark.parametrize("framework", DAMAGED)
def test_a_damaged_part_of_a_checkpoint_is_refused(framework: str, tmp_path: Path) -> None:
    assert_damaged_is_refused(framework, DAMAGED[framework][2:], tmp_path)
