"""Random configurations, the same in each run, are what their references are. ``make fuzz`` runs others for an hour."""

from __future__ import annotations

import pytest

from tests.fuzz.batch import RUNS, reproduction, run_batch
from tests.fuzz.methods import METHODS_OF_SHARDS
from tests.fuzz.outcome import FAILED


@pytest.mark.parametrize(("num_ranks", "number"), [(2, 12), (3, 4)])
@pytest.mark.parametrize("method", RUNS)
def test_random_configurations(method: str, num_ranks: int, number: int) -> None:
    check(method, num_ranks, number)


@pytest.mark.parametrize("method", METHODS_OF_SHARDS)
def test_random_shards(method: str) -> None:
    """Two replicas, each of which FSDP2 has sharded among two ranks."""
    check(method, 4, 3, num_shards=2)


def check(method: str, num_ranks: int, number: int, num_shards: int | None = None) -> None:
    outcomes = run_batch(method, range(number), num_ranks, num_shards)
    failed = [reproduction(method, num_ranks, outcome, num_shards) for outcome in outcomes if outcome.kind == FAILED]
    assert not failed, "\n\n".join(failed)
    assert sum(outcome.kind.startswith("equal") for outcome in outcomes) > number / 2
