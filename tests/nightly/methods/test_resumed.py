"""A run that is saved and resumed goes on bit for bit: the cases that tests/quick leaves out."""

from __future__ import annotations

import pytest

from tests.quick.methods.test_resumed import ARRANGED, OTHERS, QUICK, WITH_CODECS, WITH_FACTORS, Row, assert_resumes


@pytest.mark.parametrize(
    "rows", [WITH_CODECS, WITH_FACTORS, ARRANGED, OTHERS], ids=["codecs", "low rank", "topologies", "dear"]
)
def test_an_uninterrupted_run_is_continued(rows: list[Row]) -> None:
    assert_resumes([row for row in rows if row not in QUICK])
