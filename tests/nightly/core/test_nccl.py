"""The exchange over NCCL, on a CPU, with buffers of more sizes, and the other kind of sum on each number of ranks."""

from __future__ import annotations

import pytest

from tests.quick.core.test_nccl import exchange_on_the_host, exchange_with_room
from tests.references.collectives import SIZES
from tests.support.harness import on_ranks


@pytest.mark.parametrize(("world_size", "sums_wide"), [(1, False), (2, True), (3, False)])
def test_makes_what_gloo_makes(world_size: int, sums_wide: bool) -> None:
    for same in on_ranks(exchange_on_the_host, world_size, sums_wide, SIZES):
        assert all(same.values()), [name for name, equal in same.items() if not equal]


def test_what_is_in_the_room_changes_nothing() -> None:
    for same in on_ranks(exchange_with_room, 3, False):
        assert all(same.values()), [name for name, equal in same.items() if not equal]
