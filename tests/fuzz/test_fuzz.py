"""Random configurations, the same in each run, are what their references are. ``make fuzz`` runs others for an hour."""

from __future__ import annotations

import pytest

from tests.fuzz.batch import reproduction, run_batch
from tests.fuzz.methods import METHODS


@pytest.mark.parametrize(("ranks", "number"), [(2, 60), (3, 8)])
@pytest.mark.parametrize("method", METHODS)
def test_random_configurations(method: str, ranks: int, number: int) -> None:
    outcomes = run_batch(method, range(number), ranks)
    failed = [reproduction(method, ranks, outcome) for outcome in outcomes if outcome.kind == "failed"]
    assert not failed, "\n\n".join(failed)
    assert sum(outcome.kind.startswith("equal") for outcome in outcomes) > number / 2
