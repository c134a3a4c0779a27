"""All methods on a torus and on trees: what they train in a ring, but for the order of the sums."""

from __future__ import annotations

import copy
from functools import cache, partial
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from lightning_pipesync.methods.dear import DeAR
from lightning_pipesync.methods.local_sgd import LocalSGD
from lightning_pipesync.methods.pipe_sgd import PipeSGD
from lightning_pipesync.methods.selsync import SelSync
from lightning_pipesync.training.registry import METHODS
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import assert_raised, raised
from tests.support.models import Run, assert_same, seeded_mlp

STEPS = 8

#: Methods and settings, which sum in another order on another topology, and do the same otherwise.
TRAINED: dict[str, tuple[Any, dict[str, Any]]] = {
    "pipe_sgd": (PipeSGD, {"bucket_mb": 1e-4}),
    "pipe_sgd, level 2": (PipeSGD, {"pipeline_level": 2}),
    "selsync": (SelSync, {"delta": 0.2, "bucket_mb": 1e-4}),
    "selsync, gradients": (SelSync, {"delta": 0.2, "aggregation": "gradients"}),
    "selsync, overlap": (SelSync, {"delta": 0.2, "outer_lr": 0.7, "outer_momentum": 0.3, "overlap": "forward"}),
    "local_sgd": (LocalSGD, {"period": 2, "average_optimizer_states": True, "warmup_steps": 2}),
    "local_sgd, outer": (LocalSGD, {"period": 2, "outer_optimizer": "nesterov", "fragments": 2, "bucket_mb": 1e-4}),
    "local_sgd, adam": (LocalSGD, {"period": 2, "outer_optimizer": "adam", "outer_lr": 0.01}),
    "local_sgd, share": (LocalSGD, {"period": 2, "participation": 0.5}),
    "local_sgd, elastic": (LocalSGD, {"period": 2, "outer_optimizer": "elastic"}),
    "local_sgd, overlap": (LocalSGD, {"period": 3, "overlap_steps": 2, "fragments": 2, "bucket_mb": 1e-4}),
}
NOT_FLAT = ("torus2d", "tree")
TOPOLOGIES = ("flat", *NOT_FLAT)

#: The methods that average over all ranks.
ARRANGED = ("dear", "pipe_sgd", "selsync", "local_sgd")


#: What is refused, see below.
PAIRS = [(name, one) for name in TRAINED for one in TOPOLOGIES if (name, one) != ("local_sgd, overlap", "torus2d")]

#: With state of its own on each rank: residuals, and outer states of shards.
RESUMED = ["selsync", "selsync, gradients", "local_sgd, outer"]


def begin(name: str, topology: str, **changed: Any) -> Run:
    method, settings = TRAINED[name]
    return Run(method, "adamw", seeded_mlp(dist.get_rank()), topology=topology, **{**settings, **changed})


def train(name: str, topology: str) -> tuple[str, dict[str, Tensor]]:
    """Returns the topology, and the weights in the end."""
    run = begin(name, topology)
    run.steps(range(STEPS))
    return str(run.sync.transport.topology), run.end()


def stopped_and_resumed(name: str, topology: str) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
    """Returns the weights of a run and of one that resumes it halfway, with a codec; and why no other topology does."""
    half, settings = STEPS // 2, {"compression": "int8"}
    whole, first = begin(name, topology, **settings), begin(name, topology, **settings)
    for run in (whole, first):
        run.steps(range(half))
        run.sync.flush()
    saved = copy.deepcopy(first.sync.state_dict())
    second = first.resumed(seeded_mlp(1))
    whole.sync.resume()
    for run in (whole, second):
        run.steps(range(half, STEPS))
    other = begin(name, "flat", **settings)
    refusal = raised(lambda: other.sync.load_state_dict(saved))
    other.sync.detach()
    return whole.end(), second.end(), refusal


@cache
def outcomes() -> Outcomes:
    cases: dict[Any, Any] = {pair: partial(train, *pair) for pair in PAIRS}
    resumed = {("resumed", name, one): partial(stopped_and_resumed, name, one) for name in RESUMED for one in NOT_FLAT}
    return launch_cases({**cases, **resumed}, 4)


@pytest.mark.parametrize(("name", "topology"), PAIRS)
def test_it_trains_what_it_does_in_a_ring(name: str, topology: str) -> None:
    expected = outcomes()[name, "flat"]
    for (found, weights), (_, in_ring) in zip(outcomes()[name, topology], expected, strict=True):
        assert found == {"torus2d": "torus2d with rows of 2 ranks"}.get(topology, topology)
        assert_same(weights, outcomes()[name, topology][0][1])
        assert_same(weights, in_ring, exact=topology == "flat")


@pytest.mark.parametrize("topology", NOT_FLAT)
@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_is_the_uninterrupted_one(name: str, topology: str) -> None:
    """With a codec's residuals and outer states, which are of the topology that they were saved on."""
    for whole, resumed, refusal in outcomes()["resumed", name, topology]:
        assert_same(resumed, whole)
        assert_raised(refusal, "ValueError", f"'topology': '{topology}", "'topology': 'flat'")


def trained_alone(topology: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the weights of a run with an outer step of this rank's shards, and of one that clips by their norm."""
    outer, clipped = begin("local_sgd, outer", topology), Run(DeAR, "sgd", topology=topology)
    outer.steps(range(STEPS))
    for number in range(STEPS):
        clipped.backward(number)
        clipped.sync.clip(0.1)
        clipped.sync.step()
    return outer.end(), clipped.end()


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
        *((name, {"topology": "ring"}, "topology must be .*, got 'ring'") for name in ARRANGED),
        *((name, {"torus_columns": 2}, "torus_columns=2 must be .* with topology='torus2d'") for name in ARRANGED),
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
