"""Every method on every framework: exact settings are DDP, typical ones a plain loop, runs resume; cases take turns."""

from __future__ import annotations

import pytest

from tests.conformance.table import (
    assert_interchanges_with_ddp,
    assert_is_ddp,
    assert_is_plain_loop,
    assert_resumes,
    exact_rows,
    exchange_rows,
    resumed_rows,
    typical_rows,
)


@pytest.mark.parametrize(("framework", "name", "case"), exact_rows("quick"))
def test_exact_settings_are_ddp(framework: str, name: str, case: str) -> None:
    assert_is_ddp("quick", framework, name, case)


@pytest.mark.parametrize(("framework", "name", "index", "case"), typical_rows("quick"))
def test_typical_settings_are_those_of_a_plain_loop(framework: str, name: str, index: int, case: str) -> None:
    assert_is_plain_loop("quick", framework, name, index, case)


@pytest.mark.parametrize(("framework", "name", "index"), resumed_rows("quick"))
def test_a_resumed_run_is_the_uninterrupted_one(framework: str, name: str, index: int) -> None:
    assert_resumes("quick", framework, name, index)


@pytest.mark.parametrize(("framework", "name"), exchange_rows())
def test_checkpoints_interchange_with_ddp(framework: str, name: str) -> None:
    assert_interchanges_with_ddp(framework, name)
