"""A table of cases, called one after the other on the same ranks; one that fails is named, others are not touched."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

from tests.support.harness import HANGS_S, LeftBehindError, on_ranks


@dataclass(frozen=True)
class Failure:
    """What a case raised on a rank."""

    traceback: str


class Outcomes:
    """What each case has returned, or why the ranks have not."""

    def __init__(self, of_ranks: list[dict[Hashable, Any]] | str) -> None:
        self._of_ranks = of_ranks

    def __getitem__(self, case: Hashable) -> list[Any]:
        """Returns what each rank has returned.

        Raises:
            AssertionError: the case raised on a rank, or a rank died or hung.
        """
        assert not isinstance(self._of_ranks, str), self._of_ranks
        outcomes = [of_rank[case] for of_rank in self._of_ranks]
        failures = [
            f"--- {case!r} raised on rank {rank}:\n{outcome.traceback}"
            for rank, outcome in enumerate(outcomes)
            if isinstance(outcome, Failure)
        ]
        assert not failures, "\n".join(failures)
        return outcomes


def launch_cases(
    cases: Mapping[Any, Callable[[], Any]],
    world_size: int,
    *,
    init: bool = True,
    launch: Callable[..., list[Any]] = on_ranks,
) -> Outcomes:
    """Calls the function of each case on ``world_size`` ranks, one case after the other."""
    try:
        return Outcomes(launch(_run_cases, world_size, dict(cases), init=init, timeout_s=HANGS_S + 20 * len(cases)))
    except LeftBehindError as error:  # by a case that raised, perhaps, which tells more
        has_raised = any(isinstance(outcome, Failure) for of_rank in error.results for outcome in of_rank.values())
        return Outcomes(error.results if has_raised else str(error))
    except AssertionError as error:
        return Outcomes(str(error))


def _run_cases(cases: dict[Hashable, Callable[[], Any]]) -> dict[Hashable, Any]:
    outcomes: dict[Hashable, Any] = {}
    for case, function in cases.items():
        with mock.patch.dict(os.environ):  # a Trainer removes what a launcher has set
            try:
                outcomes[case] = function()
            except Exception:
                outcomes[case] = Failure(traceback.format_exc())
    return outcomes
