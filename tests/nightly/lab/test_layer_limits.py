"""The limits of a step whose layers differ: by hand, and no simulated step is below them."""

from __future__ import annotations

import random

import pytest

from lightning_pipesync.core.cost import StepCost
from lightning_pipesync.core.layer_limits import LayerLimits, LayerTimes
from lightning_pipesync.core.schedule import BucketTimes, simulate_step
from lightning_pipesync.methods.dear.eager import choose_early_gathers

NAMES = [
    "baseline",
    "two_halves",
    "eager",
    "under_forward",
    "reduce_scatter_only",
    "all_gather_only",
    "under_next_step",
    "serial",
]


def cost_of(ratio: float, update: float = 0.0) -> StepCost:
    return StepCost(forward=1.0, backward=2.0, update=update, reduce_scatter=1.5 * ratio, all_gather=1.5 * ratio)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.33, 2.0])
def test_many_equal_layers_have_the_limits_of_the_papers(name: str, ratio: float) -> None:
    cost = cost_of(ratio, update=0.25)
    layers = [LayerTimes(ready=2 - i / 500, needed=i / 1000, num_bytes=8) for i in range(1000)]
    assert LayerLimits(cost, layers).get(name) == pytest.approx(getattr(cost, name), rel=0.005)


def test_embeddings_by_hand() -> None:
    """A fifth of all values is ready at the end of backward, and needed at the beginning of forward."""
    layers = [LayerTimes(ready=2.0, needed=0.0, num_bytes=20)]
    layers += [LayerTimes(ready=2 - i / 40, needed=i / 80, num_bytes=1) for i in range(1, 81)]
    limits = LayerLimits(cost_of(1.0), layers)
    assert limits.get("eager") == pytest.approx(3.0 + 0.2 * 3.0), "its two halves are hidden under nothing"
    assert limits.get("baseline") == pytest.approx(4.0), "the all-reduces of the others keep the network busy"
    assert limits.get("two_halves") == pytest.approx(2.0 + 0.3 + 1.5), (
        "a reduce-scatter at the end, then all all-gathers"
    )
    assert limits.get("serial") == 6.0


@pytest.mark.parametrize("seed", range(20))
def test_no_simulated_step_is_shorter(seed: int) -> None:
    draw = random.Random(seed)
    ratio = draw.choice([0.67, 0.8, 1.0, 1.25, 1.33])
    moments = sorted(draw.uniform(0.0, 2.0) for _ in range(12))
    layers = [LayerTimes(m, 1 - m / 2, draw.randint(1, 100)) for m in [*moments, 2.0]]
    share = 1.5 * ratio / sum(layer.num_bytes for layer in layers)
    buckets = [BucketTimes(x.ready, x.needed, share * x.num_bytes, share * x.num_bytes) for x in layers]
    limits = LayerLimits(cost_of(ratio), layers)
    paper, eager = (simulate_step(buckets, 1.0, 2.0, early).seconds for early in (None, choose_early_gathers(buckets)))
    assert paper >= limits.get("two_halves") - 1e-9
    assert limits.get("eager") - 1e-9 <= eager <= paper
    assert limits.get("eager") <= limits.get("two_halves") + 1e-9
