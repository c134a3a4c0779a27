"""SelSync's cases on the other number of ranks than in tests/quick."""

from __future__ import annotations

import pytest

from tests.quick.methods.test_selsync import FIRST, SECOND, assert_follows_algorithm_1


@pytest.mark.parametrize(("world_size", "resumed_at", "names"), [(2, None, SECOND), (3, 13, FIRST)])
def test_follows_algorithm_1(world_size: int, resumed_at: int | None, names: list[str]) -> None:
    assert_follows_algorithm_1(world_size, resumed_at, names)
