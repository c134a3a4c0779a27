"""All methods on a torus and on trees: what they train in a ring, but for the order of the sums."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipesync.training.registry import METHODS
from tests.support.case_table import launch_cases
from tests.support.method_runs import FACTORIZED, SMALL
from tests.support.models import Run, assert_same, seeded_mlp

STEPS = 8

#: By case: the method, and settings with which it sums in another order on another topology, and is the same otherwise.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dear": ("dear", SMALL),
    "dear, early": ("dear", {"fusion": "buffer", "overlap": "eager", **SMALL}),
    "dear, forward": ("dear", {"fusion": "none", "overlap": "forward"}),
    "pipe_sgd": ("pipe_sgd", SMALL),
    "pipe_sgd, level 2": ("pipe_sgd", {"pipeline_level": 2}),
    "selsync": ("selsync", {"delta": 0.2, **SMALL}),
    "selsync, gradients": ("selsync", {"delta": 0.2, "aggregation": "gradients"}),
    "selsync, overlap": ("selsync", {"delta": 0.2, "outer_lr": 0.7, "outer_momentum": 0.3, "overlap": "forward"}),
    "local_sgd": ("local_sgd", {"period": 2, "average_optimizer_states": True, "warmup_steps": 2}),
    "local_sgd, outer": ("local_sgd", {"period": 2, "outer_optimizer": "nesterov", "fragments": 2, **SMALL}),
    "local_sgd, adam": ("local_sgd", {"period": 2, "outer_optimizer": "adam", "outer_lr": 0.01}),
    "local_sgd, share": ("local_sgd", {"period": 2, "participation": 0.5}),
    "local_sgd, elastic": ("local_sgd", {"period": 2, "outer_optimizer": "elastic"}),
    "local_sgd, overlap": ("local_sgd", {"period": 3, "overlap_steps": 2, "fragments": 2, **SMALL}),
    **{
        f"{case}, {kind}": (name, {**settings, "low_rank": 2, "low_rank_method": kind})
        for (case, (name, settings)), kind in product(FACTORIZED.items(), ("acp_sgd", "power_sgd"))
    },
}
TOPOLOGIES = ("torus2d", "tree")
#: The methods that average over all ranks.
ARRANGED = ("dear", "pipe_sgd", "selsync", "local_sgd")


def train(case: str, topology: str) -> tuple[str, dict[str, Tensor]]:
    """Returns the topology, and the weights in the end; rank 0's first ones count."""
    name, settings = CASES[case]
    run = Run(METHODS[name], "adamw", seeded_mlp(dist.get_rank()), topology=topology, **settings)
    run.steps(range(STEPS))
    return str(run.sync.transport.topology), run.end()


def assert_trains_as_in_a_ring(cases: Sequence[str]) -> None:
    """Asserts it of four ranks; factors that are rounded otherwise are off by more than sums."""
    # Averages under further steps are refused on a torus, see below.
    pairs = [(case, one) for case in cases for one in TOPOLOGIES if (case, one) != ("local_sgd, overlap", "torus2d")]
    rows = [*((case, "flat") for case in cases), *pairs]
    outcomes = launch_cases({row: partial(train, *row) for row in rows}, 4)
    for case, topology in rows:
        expected, everyones = outcomes[case, "flat"][0][1], outcomes[case, topology]
        for found, weights in everyones:
            assert found == {"torus2d": "torus2d with rows of 2 ranks"}.get(topology, topology)
            assert_same(weights, everyones[0][1], (case, topology))
            if "low_rank" in CASES[case][1]:
                torch.testing.assert_close(weights, expected, rtol=1e-3, atol=1e-5)
            else:
                assert_same(weights, expected, (case, topology), exact=False)


def test_methods_train_what_they_do_in_a_ring() -> None:
    assert_trains_as_in_a_ring(["pipe_sgd", "selsync, overlap", "local_sgd, outer", "dear, acp_sgd"])


def trained_alone(topology: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the weights of a run with an outer step of this rank's shards, and of one that clips by their norm."""
    clipped = Run(METHODS["dear"], "sgd", topology=topology)
    for number in range(STEPS):
        clipped.backward(number)
        clipped.sync.clip(0.1)
        clipped.sync.step()
    return train("local_sgd, outer", topology)[1], clipped.end()


def test_a_rank_alone_owns_all_of_a_tree() -> None:
    alone = launch_cases({topology: partial(trained_alone, topology) for topology in ("flat", "tree")}, 1)
    for weights, expected in zip(alone["tree"][0], alone["flat"][0], strict=True):
        assert_same(weights, expected)


@pytest.mark.parametrize(
    ("method", "settings", "words"),
    [
        ("local_sgd", {"topology": "torus2d", "period": 4, "overlap_steps": 1}, "overlap_steps=1 runs averages under"),
        ("local_sgd", {"topology": "tree", "ranks_per_replica": 2}, "ranks_per_replica=2 .* set topology='auto'"),
        ("local_sgd", {"topology": "tree", "lighthouse": "host:1"}, "topology='tree' arranges replicas that stay"),
        ("local_sgd", {"topology": "torus2d", "neighbors": "ring"}, "topology='torus2d' arranges all replicas"),
        ("selsync", {"topology": "tree", "average": "server"}, "topology='tree' is for .* set topology='auto'"),
        *((name, {"torus_columns": 2}, "torus_columns=2 has no effect .* topology='torus2d'") for name in ARRANGED),
    ],
)
def test_what_cannot_be_is_refused(method: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        METHODS[method].config_type(**settings)


def test_averages_under_further_steps_are_flat() -> None:
    """With ``auto``: on a torus they would advance only while a step waits for them."""
    config = METHODS["local_sgd"].config_type
    assert config(compression="int8").arrangement["topology"] == "auto"
    assert config(compression="int8", overlap_steps=1).arrangement["topology"] == "flat"
    assert config(lighthouse="host:1").arrangement["topology"] == "flat"


@pytest.mark.parametrize("method", ARRANGED)
def test_rows_of_a_torus_are_hosts(method: str) -> None:
    config = METHODS[method].config_type
    assert config(topology="torus2d").on_hosts_of(2, 8).torus_columns == 2
    assert config(topology="torus2d", torus_columns=4).on_hosts_of(2, 8).torus_columns == 4
    assert config(topology="tree").on_hosts_of(2, 8).torus_columns is None
