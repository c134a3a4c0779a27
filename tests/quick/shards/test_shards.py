"""Each method between replicas of two ranks, among which FSDP2 shards the network; DeAR on each framework, too."""

from __future__ import annotations

import pytest

from tests.conformance import sharded_table


@pytest.mark.parametrize(("framework", "name", "case"), sharded_table.exact_rows("quick"))
def test_exact_settings_are_fsdp2_on_a_mesh_of_two_dimensions(framework: str, name: str, case: str) -> None:
    sharded_table.assert_is_fsdp("quick", framework, name, case)


@pytest.mark.parametrize(("framework", "name", "index"), sharded_table.resumed_rows("quick"))
def test_a_resumed_run_is_the_uninterrupted_one(framework: str, name: str, index: int) -> None:
    sharded_table.assert_resumes("quick", framework, name, index)
