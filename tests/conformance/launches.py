"""Two ranks are launched once for many cases; whatever becomes of one, the others are told of."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import cache
from typing import Any

from tests.harness import launch

#: By rank, what became of each case: its result, or the traceback of what it raised.
Outcomes = list[dict[Any, Any]]

#: Seconds after which ranks have hung: far more than they need, also on a busy machine.
HUNG_S = 200


def attempt(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns what a function returns, or the traceback of what it raises."""
    try:
        return function(*args, **kwargs)
    except Exception:
        return traceback.format_exc()


def outcomes_of(function: Callable[..., Any], framework: str, *args: Any) -> Outcomes:
    """Returns what ``function(framework, *args)`` returns on two ranks, which are launched once."""
    outcomes = _launched(function, framework, *args)
    assert not isinstance(outcomes, str), outcomes
    return outcomes


def result_of(of_rank: dict[Any, Any], case: Any) -> Any:
    """Returns the result of a case; it is a failure if it raised."""
    assert not isinstance(of_rank[case], str), of_rank[case]
    return of_rank[case]


@cache
def _launched(function: Callable[..., Any], framework: str, *args: Any) -> Outcomes | str:
    return attempt(launch, function, 2, framework, *args, init=framework == "plain", timeout_s=HUNG_S)
