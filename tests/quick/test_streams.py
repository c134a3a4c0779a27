"""Each method on streams: nothing is read or written out of order, and each wait is needed."""

from __future__ import annotations

import pytest

from tests.streams.mutations import MUTATIONS, waits_in_package
from tests.streams.streams import Wait
from tests.streams.table import LOOPS, QUICK, TRAININGS, assert_nothing_reported
from tests.streams.trainings import checked, train, train_as_others
from tests.support.harness import on_ranks


@pytest.mark.parametrize("name", QUICK)
def test_a_training_is_in_order(name: str) -> None:
    assert_nothing_reported(2, train, [(TRAININGS[name][0],)])


def test_a_pipeline_is_in_order() -> None:
    assert_nothing_reported(2, train_as_others, [next(loop for loop in LOOPS if loop[1] == "ea_pipe")])


def test_each_wait_of_the_package_has_a_mutation() -> None:
    assert set(waits_in_package()) == set(MUTATIONS)


@pytest.mark.parametrize("wait", MUTATIONS, ids=":".join)
def test_a_wait_that_is_missing_is_reported(wait: Wait) -> None:
    run, args = MUTATIONS[wait]
    outcomes = on_ranks(checked, 2, run, args, wait)
    assert any(reached for _, reached in outcomes), "the run does not come to this wait"
    assert any(reports for reports, _ in outcomes)
