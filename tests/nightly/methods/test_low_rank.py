"""Low-rank factors of gradients: all loops on two and three ranks."""

from __future__ import annotations

from itertools import product

import pytest

from tests.quick.methods.test_low_rank import ALGORITHMS, CASES, assert_follows
from tests.support.method_runs import FACTORIZED


@pytest.mark.parametrize("world_size", [2, 3])
def test_follows_the_algorithm(world_size: int) -> None:
    """Those of two ranks that tests/quick leaves out, and all of three."""
    rows = product(CASES, ALGORITHMS)
    assert_follows([row for row in rows if world_size == 3 or row[0] not in FACTORIZED], world_size)
