"""Claims of the papers: whether they hold is computed from what was measured, with what speaks against them."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.results.exhibit import Claims, Finding
from benchmarks.results.job import Record
from benchmarks.results.papers import TABLES


def finding(claims: str, where: str, *results: dict[str, Any]) -> Finding:
    shown = TABLES[claims]
    assert isinstance(shown, Claims)
    [claim] = [claim for claim in shown.claims if claim.where == where]
    return claim.find([Record("job", "command", "kind", {}, [result]) for result in results])


@pytest.mark.parametrize(
    ("bo", "cases", "text"),
    [
        ([[2.0, 1.0]] * 2, [True, True], "bo 2.0 (2 of 2 got there), random 3.0 (2 of 2 got there)"),
        ([[2.0, 1.0], [2.0]], [True, False], "bo 2.0 (1 of 2 got there)"),  # giving up early is no quick success
        ([[2.0, 1.5, 1.5, 1.0], [2.0]], [False, False], "bo 4.0 (1 of 2 got there)"),
        ([[2.0], [2.0]], [False, False], "bo inf (0 of 2 got there)"),
    ],
)
def test_a_search_that_gives_up_is_not_one_that_finds_soon(bo: list[list[float]], cases: list[bool], text: str) -> None:
    """Of each search the best step so far, after each trial; 1.0 is the best of all. Of the others one takes tens."""
    others = {"random": [[2.0, 1.5, 1.0]] * 2, "grid": [[*[2.0] * 9, 1.0]] * 2}
    runs = [{"search": kind, "best": 1.0, "steps": one} for kind, some in {"bo": bo, **others}.items() for one in some]
    found = finding("dear_claims", "Fig. 10", {"runs": runs})
    assert (found.cases, text in found.text) == ([*cases, False, True], True), found.text


def test_byte_scheduler_is_compared_on_networks_with_convolutions() -> None:
    names = ("no communication", "DDP, 1 MiB", "WFBP", "ByteScheduler", "dear (fusion=none, overlap=forward)")
    seconds = {"emulated-resnet50": (0.6, 1.0, 2.0, 2.5, 1.8), "emulated-bert-base": (0.6, 1.0, 2.0, 9.0, 2.5)}
    cost = {"forward": 0.2, "backward": 0.4, "reduce_scatter": 0.2, "all_gather": 0.2, "update": 0.0}
    results = []
    for model, times in seconds.items():
        limits = {"limit": 0.6, "layer_limit": 0.6, "predicted": None, "processor_seconds": [0.0]}
        candidates = [{"name": name, "seconds": [took], **limits} for name, took in zip(names, times, strict=True)]
        run = {"cost": cost, "candidates": candidates}
        results.append({"settings": {"model": model}, "world_size": 4, "runs": [run]})
    found = finding("dear_claims", "Fig. 6", *results)
    assert found.text == "0.80 to 1.11 times WFBP with the paper's schedule; ByteScheduler 0.80 times WFBP on CNNs"
    assert found.cases == [True, False, True]


@pytest.mark.parametrize(("spectrain", "cases"), [(9.0, [True, True]), (4.0, [False, True]), (2.0, [False, False])])
def test_spectrain_is_compared_at_the_rate_that_suits_each(spectrain: float, cases: list[bool]) -> None:
    """Errors at two rates, of which the validation set chooses the better one."""
    errors = {"sgd": 3.0, "spectrain": spectrain, "pipedream": 5.0, "ea_pipe:elastic_force=0.1": 3.0}
    runs = [
        {
            "method": method,
            "batch_size": 4,
            "learning_rate": rate,
            "seed": 0,
            "diverged": False,
            "points": [{"epoch": 1.0, "error": error, "validation": error}],
        }
        for method, best in errors.items()
        for rate, error in ((0.1, best), (0.01, best + 1.0))
    ]
    settings = {"task": "digits", "batch_sizes": [4], "learning_rates": [0.1, 0.01], "methods": list(errors)}
    found = finding("ea_pipe_claims", "Tables 1, 4", {"settings": settings, "runs": runs})
    assert found.cases == cases
    assert f"digits: {spectrain - 5:+.1f} points from PipeDream's, {spectrain - 3:+.1f} from EA-Pipe's" in found.text


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
