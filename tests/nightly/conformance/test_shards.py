"""Every method between replicas that FSDP2 shards, on every framework: what is not tested before each commit."""

from __future__ import annotations

import pytest

from tests.conformance import sharded_table


@pytest.mark.parametrize(("framework", "name", "case"), sharded_table.exact_rows("nightly"))
def test_exact_settings_are_fsdp2_on_a_mesh_of_two_dimensions(framework: str, name: str, case: str) -> None:
    sharded_table.assert_is_fsdp("nightly", framework, name, case)


@pytest.mark.parametrize(("framework", "name"), sharded_table.typical_rows())
def test_typical_settings_are_those_of_a_plain_loop(framework: str, name: str) -> None:
    sharded_table.assert_is_plain_loop(framework, name)


@pytest.mark.parametrize(("framework", "name", "index"), sharded_table.resumed_rows("nightly"))
def test_a_resumed_run_is_the_uninterrupted_one(framework: str, name: str, index: int) -> None:
    sharded_table.assert_resumes("nightly", framework, name, index)
