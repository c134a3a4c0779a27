"""What people do between two steps: each method trains as gradients averaged by hand do, or refuses it by name."""

from __future__ import annotations

from functools import partial

import pytest

from tests.support.case_table import Outcomes, launch_cases
from tests.support.habit_runs import AVERAGES, LOST, OF_DDP, OF_GRADIENTS, UNSEEN, assert_trained, refusal, train
from tests.support.habits import HABITS
from tests.support.method_runs import SYNCHRONOUS

CASES = [(method, name, waits) for method in SYNCHRONOUS for name in HABITS for waits in (False, True)]
CASES += [("ddp", name, False) for name in HABITS]


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    cases = [*CASES, *(("by hand", name, waits) for name in HABITS for waits in (True, False))]
    return launch_cases({case: partial(train, *case) for case in cases}, 2)


@pytest.mark.parametrize("method", ["ddp", *SYNCHRONOUS])
@pytest.mark.parametrize("name", HABITS)
def test_a_habit_is_trained_on_or_refused(name: str, method: str, outcomes: Outcomes) -> None:
    for waits in (False, True) if method in SYNCHRONOUS else (False,):
        if (name, method) in LOST or ((name, method) in UNSEEN and not waits) or (method == "ddp" and name in OF_DDP):
            continue
        # Other methods use a gradient that is written to on each rank.
        of_average = waits and (name not in OF_GRADIENTS or method in AVERAGES)
        of_average |= method == "ddp" and name in OF_GRADIENTS
        expected = outcomes["by hand", name, of_average]
        assert_trained(outcomes[method, name, waits], expected, refusal(method, name, waits))
