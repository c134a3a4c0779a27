"""Random configurations, the same in each run, are what their references are. ``make fuzz`` runs others for an hour."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import pytest

from tests.fuzz.batch import RUNS, reproduction, run_batch
from tests.fuzz.configuration import Configuration, draw
from tests.fuzz.layers import LAYERS
from tests.fuzz.methods import METHODS, METHODS_OF_SHARDS, Check
from tests.fuzz.outcome import FAILED
from tests.fuzz.training import EVENTS

#: What each method trains at least once as its reference does, on two ranks.
COVERED = [*LAYERS, *EVENTS]


def features(drawn: Configuration) -> set[Hashable]:
    """Returns what a configuration covers; nothing, unless its training is compared with the reference."""
    if drawn.refused or drawn.may_be_refused or drawn.check != Check.REFERENCE:
        return set()
    updates_at = drawn.settings.get("update", drawn.settings.get("servers"))
    several, passes = ("several optimizers", drawn.several_optimizers), (drawn.accumulate, drawn.no_sync)
    overflow = ("overflow", drawn.overflow is not None, drawn.settings.get("staleness"))
    return {*drawn.layers, *drawn.events.values(), (drawn.optimizer, updates_at), several, passes, drawn.clip, overflow}


def covering_seeds(method: str) -> list[int]:
    """Returns few of the first 400 seeds, which cover all that these do."""
    by_seed = {seed: features(draw(method, seed)) for seed in range(400)}
    left, chosen = set().union(*by_seed.values()), list[int]()
    missing = {name for name in COVERED if name not in left and not (name in LAYERS and LAYERS[name].refused)}
    assert missing <= {"reattach"}, missing  # after which another method may be one without a reference
    while left:
        chosen.append(max(by_seed, key=lambda seed: len(by_seed[seed] & left)))
        left -= by_seed[chosen[-1]]
    return chosen


@pytest.mark.parametrize("method", METHODS)
def test_each_layer_event_and_optimizer_is_that_of_the_reference(method: str) -> None:
    """On two ranks, with each method: models of all kinds, and what may happen between two steps."""
    check(method, 2, covering_seeds(method))


@pytest.mark.parametrize(("method", "num_ranks"), [("ea_pipe", 2), *((method, 3) for method in RUNS)])
def test_random_configurations(method: str, num_ranks: int) -> None:
    check(method, num_ranks, range(12 if num_ranks == 2 else 6))


@pytest.mark.parametrize("method", METHODS_OF_SHARDS)
def test_random_shards(method: str) -> None:
    """Two replicas, each of which FSDP2 has sharded among two ranks."""
    check(method, 4, range(3), num_shards=2)


def check(method: str, num_ranks: int, seeds: Sequence[int], num_shards: int | None = None) -> None:
    outcomes = run_batch(method, seeds, num_ranks, num_shards)
    failed = [reproduction(method, num_ranks, outcome, num_shards) for outcome in outcomes if outcome.kind == FAILED]
    assert not failed, "\n\n".join(failed)
    assert sum(outcome.kind.startswith("equal") for outcome in outcomes) > len(seeds) / 2
