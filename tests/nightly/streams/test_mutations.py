"""Without any one of the package's waits, the checker reports what is then not in order."""

from __future__ import annotations

import pytest

from tests.streams.mutations import MUTATIONS
from tests.streams.streams import Wait
from tests.streams.trainings import checked
from tests.support.harness import on_ranks


@pytest.mark.parametrize("wait", list(MUTATIONS)[1:], ids=":".join)
def test_a_wait_that_is_missing_is_reported(wait: Wait) -> None:
    run, args = MUTATIONS[wait]
    outcomes = on_ranks(checked, 2, run, args, wait)
    assert any(reached for _, reached in outcomes), "the run does not come to this wait"
    assert any(reports for reports, _ in outcomes)
