"""The claims on why to synchronize, and when: whether they hold is computed from what was measured."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.results.exhibit import Claims
from benchmarks.results.job import Record
from benchmarks.results.papers import TABLES

CLAIMS = TABLES["selsync_motivation_claims"]
PA, GA = "selsync", "selsync:aggregation=gradients"


def scaling(four: float) -> list[dict[str, Any]]:
    """A step of 1 s that takes so long on 4 workers, and half of it on 2."""
    return [
        {
            "world_size": world_size,
            "settings": {"ratio": [0.5]},
            "runs": [{"seconds": {"no communication": [1.0], "parameter server": [four * world_size / 4]}}],
        }
        for world_size in (2, 4)
    ]


def batches(time: float, memory: float) -> list[dict[str, Any]]:
    models = [{"seconds": [1.0, time], "peak": [10, 10 * memory]}]
    return [{"settings": {"workers": [1, 8]}, "models": models}]


def sensitivity(deviation: float, eigenvalues: list[float], changes: list[float]) -> list[dict[str, Any]]:
    """The variance rises, and the quality moves less and less."""
    points = [
        {"eigenvalue": eigenvalue, "variance": float(i), "change": change, "quality": quality}
        for i, (eigenvalue, change, quality) in enumerate(zip(eigenvalues, changes, [0, 60, 80, 90], strict=True), 1)
    ]
    densities = [{"deviation": 1.0}, {"deviation": deviation}]
    return [{"runs": [{"task": "digits", "points": points, "densities": densities}]}]


def weights(gradients: float, *wide: float) -> list[dict[str, Any]]:
    """Of averaged gradients, how far from BSP; and how wide half way, and at the end."""
    of_methods = {"ddp": (0.0, (2.0, 2.0)), PA: (1.0, (2.0, 2.0)), GA: (gradients, wide)}
    runs = [
        {"method": method, "points": [{"distance": distance, "deviation": one} for one in deviations]}
        for method, (distance, deviations) in of_methods.items()
    ]
    return [{"settings": {"methods": ["ddp", PA, GA]}, "runs": runs}]


FALLING, RISING = [4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("figure", "results", "holds", "text"),
    [
        ("Fig. 1a", scaling(4.0), "yes", "ratio 0.5: 1.00 times one worker with 4"),
        ("Fig. 1a", scaling(1.0), "no", "4.00 times"),
        ("Fig. 2", batches(7.0, 4.0), "yes", "8 times the samples: 7.0 times as long, 4.0 times the memory"),
        ("Fig. 2", batches(7.0, 1.0), "in part", "1.0 times the memory"),
        ("Fig. 3", sensitivity(0.5, RISING, FALLING), "yes", "digits: 0.50"),
        ("Fig. 3", sensitivity(1.5, RISING, FALLING), "no", "digits: 1.50"),
        ("Fig. 4", sensitivity(0.5, RISING, FALLING), "yes", "digits: 1.00"),
        ("Fig. 4", sensitivity(0.5, FALLING, FALLING), "no", "digits: -1.00"),
        ("Fig. 5", sensitivity(0.5, RISING, FALLING), "yes", "digits: 1.00"),
        ("Fig. 5", sensitivity(0.5, RISING, RISING), "no", "digits: -1.00"),
        (
            "Fig. 11",
            weights(3.0, 3.0, 1.0),
            "yes",
            "at the end, with gradients 3.0 times as far from BSP, and 0.50 times",
        ),
        (
            "Fig. 11",
            weights(3.0, 3.0, 3.0),
            "in part",
            "at the end, with gradients 3.0 times as far from BSP, and 1.50",
        ),
        ("Fig. 11", weights(0.5, 1.0, 3.0), "no", "0.5 times"),
    ],
)
def test_whether_a_claim_holds(figure: str, results: list[dict[str, Any]], holds: str, text: str) -> None:
    assert isinstance(CLAIMS, Claims)
    [claim] = [claim for claim in CLAIMS.claims if claim.where == figure]
    found = claim.find([Record("job", "command", "kind", {}, results)])
    assert found.holds == holds
    assert text in found.text
