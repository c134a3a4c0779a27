"""The cases of every method on every framework whose turn it is not in tests/quick."""

from __future__ import annotations

import pytest

from tests.conformance.table import (
    assert_is_ddp,
    assert_is_plain_loop,
    assert_resumes,
    exact_rows,
    resumed_rows,
    typical_rows,
)


@pytest.mark.parametrize(("framework", "name", "case"), exact_rows("nightly"))
def test_exact_settings_are_ddp(framework: str, name: str, case: str) -> None:
    assert_is_ddp("nightly", framework, name, case)


@pytest.mark.parametrize(("framework", "name", "index", "case"), typical_rows("nightly"))
def test_typical_settings_are_those_of_a_plain_loop(framework: str, name: str, index: int, case: str) -> None:
    assert_is_plain_loop("nightly", framework, name, index, case)


@pytest.mark.parametrize(("framework", "name", "index"), resumed_rows("nightly"))
def test_a_resumed_run_is_the_uninterrupted_one(framework: str, name: str, index: int) -> None:
    assert_resumes("nightly", framework, name, index)
