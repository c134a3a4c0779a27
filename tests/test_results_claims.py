"""Claims of the papers: whether they hold is computed from what was measured, with what speaks against them."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.results.exhibit import Claims, Finding
from benchmarks.results.job import Record
from benchmarks.results.papers import TABLES


def finding(claims: str, where: str, result: dict[str, Any]) -> Finding:
    shown = TABLES[claims]
    assert isinstance(shown, Claims)
    [claim] = [claim for claim in shown.claims if claim.where == where]
    return claim.find([Record("job", "command", "kind", {}, [result])])


@pytest.mark.parametrize(
    ("bo", "holds", "text"),
    [
        ([[2.0, 1.0]] * 2, "yes", "bo 2.0 (2 of 2 got there), random 3.0 (2 of 2 got there)"),
        ([[2.0, 1.0], [2.0]], "in part", "bo 2.0 (1 of 2 got there)"),  # giving up early is no quick success
        ([[2.0, 1.5, 1.5, 1.0], [2.0]], "no", "bo 4.0 (1 of 2 got there)"),
        ([[2.0], [2.0]], "no", "bo inf (0 of 2 got there)"),
    ],
)
def test_a_search_that_gives_up_is_not_one_that_finds_soon(bo: list[list[float]], holds: str, text: str) -> None:
    """Of each search the best step so far, after each trial; 1.0 is the best of all."""
    others = {"random": [[2.0, 1.5, 1.0]] * 2, "grid": [[2.0, 1.5, 1.5, 1.0]] * 2}
    runs = [{"search": kind, "best": 1.0, "steps": one} for kind, some in {"bo": bo, **others}.items() for one in some]
    found = finding("dear_claims", "Fig. 10", {"runs": runs})
    assert (found.holds, text in found.text) == (holds, True), found.text


def test_large_batches_have_each_size() -> None:
    """Scaling with warm-up may win at one size, and lose at a larger one."""
    accuracy = {"unchanged": (90.0, 80.0, 50.0), "linear scaling, warm-up": (90.0, 85.0, 10.0)}
    runs = [
        {"batch_size": size, "rule": rule, "accuracy": value}
        for rule, values in accuracy.items()
        for size, value in zip((32, 64, 128), values, strict=True)
    ]
    result = {"settings": {"task": "digits", "batch_sizes": [32, 64, 128]}, "runs": runs}
    found = finding("lecture_claims", "large mini-batches", result)
    assert (found.holds, "digits 64: +5.0, 128: -40.0" in found.text) == ("in part", True), found.text


@pytest.mark.parametrize(
    ("ruled", "small", "holds"),
    [((2.0, 2.5), 3.0, "yes"), ((2.0, 2.5), 1.0, "in part"), ((9.0, 9.5), 1.0, "no")],
)
def test_rates_by_staleness_are_compared_with_a_smaller_fixed_rate(
    ruled: tuple[float, float], small: float, holds: str
) -> None:
    at_large = {"sync": 5.0, "k_sync:k=10": 2.0, "async": 8.0}
    at_large |= {f"async:staleness_lr={rule}": error for rule, error in zip(("mean", "gradient"), ruled, strict=True)}
    policies = [{"method": name, "learning_rate": 0.3, "errors": [error]} for name, error in at_large.items()]
    policies.append({"method": "async", "learning_rate": 0.1, "errors": [small]})
    result = {"settings": {"learning_rates": [0.1, 0.3]}, "policies": policies}
    found = finding("lecture_claims", "Fig. 9", result)
    assert (found.holds, f"at 0.1 the fixed rate has {small:.1f}%" in found.text) == (holds, True), found.text
