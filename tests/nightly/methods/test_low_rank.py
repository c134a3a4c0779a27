"""Low-rank factors of gradients: all loops on two and three ranks, and ranks that are lost."""

from __future__ import annotations

from itertools import product

import pytest
import torch.distributed as dist

from tests.quick.methods.test_low_rank import ALGORITHMS, CASES, RANK, assert_follows
from tests.support.harness import assert_raised, on_ranks
from tests.support.method_runs import FACTORIZED, begin


@pytest.mark.parametrize("world_size", [2, 3])
def test_follows_the_algorithm(world_size: int) -> None:
    """Those of two ranks that tests/quick leaves out, and all of three."""
    rows = product(CASES, ALGORITHMS)
    assert_follows([row for row in rows if world_size == 3 or row[0] not in FACTORIZED], world_size)


def lose_a_rank(method: str) -> tuple[str, str]:
    """Rank 1 raises between two steps, and lives on."""
    run = begin(method, low_rank=RANK, low_rank_method="power_sgd", timeout_s=300)
    try:
        for step in range(100):
            if step == 3 and dist.get_rank() == 1:
                raise KeyError("a bug")
            run.step(step)
    except Exception as error:
        run.sync.detach(timeout_s=1.0)
        return type(error).__name__, str(error)
    return "none", ""


@pytest.mark.parametrize("method", FACTORIZED)
def test_nobody_waits_for_a_lost_rank(method: str) -> None:
    other, lost = on_ranks(lose_a_rank, 2, method)
    assert_raised(other, "RuntimeError", "rank 1")
    assert_raised(lost, "KeyError", "a bug")
