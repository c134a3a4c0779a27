"""What becomes of a configuration: it is right, refused in clear words, or has failed."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.fuzz.methods import Check
from tests.fuzz.training import Seen

if TYPE_CHECKING:
    from tests.fuzz.configuration import Configuration
    from tests.fuzz.pipelines import Pipeline

#: Of float64, where sums are made in another order; Adam and its like make some rounding errors larger.
TOLERANCE = 1e-6

FAILED = "failed"


@dataclass(frozen=True)
class Outcome:
    """What became of a configuration, the same on all ranks.

    Attributes:
        kind: how it was checked, "refused" or ``FAILED``.
        problem: of each rank, if it has failed.
    """

    seed: int
    kind: str
    problem: str = ""


def judge(drawn: Configuration | Pipeline, train: Callable[[], Seen], expected: Callable[[], Seen]) -> Outcome:
    """Trains, and compares what each rank has seen with what was expected and with rank 0; a collective call."""
    seen, error = _attempt(train)
    errors = _gathered(error)
    if any(errors):
        words = drawn.refused + drawn.may_be_refused
        if all(error is not None and _is_clear(error, words) for error in errors):
            return Outcome(drawn.seed, "refused")
        return _failed(drawn, [error and error[2] for error in errors])
    of_first = _gathered({name: value for name, value in seen.items() if drawn.is_agreed(name)})[0]
    problem = difference({name: seen.get(name) for name in of_first}, of_first, 0.0)
    problem = problem and f"unlike rank 0: {problem}"
    if drawn.refused:
        problem = f"was to be refused with one of {drawn.refused}"
    elif not all(bool(value.isfinite().all()) for value in seen.values() if isinstance(value, Tensor)):
        problem = "is not finite"
    elif drawn.check != Check.AGREEMENT:
        wanted, raised = _attempt(expected)
        rounds = drawn.check == Check.REFERENCE and drawn.double
        problem = (raised and raised[2]) or problem or difference(seen, wanted, TOLERANCE if rounds else 0.0)
    problems = _gathered(problem)
    return _failed(drawn, problems) if any(problems) else Outcome(drawn.seed, drawn.check.value)


def _attempt(train: Callable[[], Seen]) -> tuple[Seen, tuple[str, str, str] | None]:
    """Returns what was seen, and type, message and traceback of what was raised."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return train(), None
    except Exception as error:
        return {}, (type(error).__name__, str(error), traceback.format_exc())


def _gathered(value: Any) -> list[Any]:
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, value)
    return of_ranks


def _is_clear(error: tuple[str, str, str], words: tuple[str, ...]) -> bool:
    return error[0] in ("ValueError", "RuntimeError") and any(one in error[1] for one in words)


def _failed(drawn: Configuration | Pipeline, problems: list[str | None]) -> Outcome:
    by_rank = "\n".join(f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem)
    return Outcome(drawn.seed, FAILED, f"{drawn}\n{by_rank}")


def difference(actual: Seen, expected: Seen, tolerance: float) -> str:
    """Returns the first difference, in words; empty if there is none."""
    for name in expected:
        if name not in actual:
            return f"{name} is missing"
        one, other = actual[name], expected[name]
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            if one != other and not (isinstance(one, float) and abs(one - other) <= tolerance * abs(other)):
                return f"{name} is {one!r} instead of {other!r}"
        elif one.shape != other.shape or one.dtype != other.dtype:
            return f"{name} is {one.dtype} {list(one.shape)} instead of {other.dtype} {list(other.shape)}"
        elif not torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True):
            off = (one.double() - other.double()).abs().max()
            return f"{name} is off by {off:.3g} of {other.double().abs().max():.3g}"
    return "".join(f"{name} is too much" for name in actual.keys() - expected.keys())
