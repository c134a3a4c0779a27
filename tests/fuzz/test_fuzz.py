"""Random configurations, the same in each run, are what their references are. ``make fuzz`` runs others for an hour."""

from __future__ import annotations

import pytest

from tests.fuzz.batch import RUNS, reproduction, run_batch
from tests.fuzz.outcome import FAILED


@pytest.mark.parametrize(("num_ranks", "number"), [(2, 36), (3, 6)])
@pytest.mark.parametrize("method", RUNS)
def test_random_configurations(method: str, num_ranks: int, number: int) -> None:
    outcomes = run_batch(method, range(number), num_ranks)
    failed = [reproduction(method, num_ranks, outcome) for outcome in outcomes if outcome.kind == FAILED]
    assert not failed, "\n\n".join(failed)
    assert sum(outcome.kind.startswith("equal") for outcome in outcomes) > number / 2
