"""Replicas that lose a rank: all others name it, also those that are no neighbors of it, and go back to what they had.

After the loss `state_dict` returns what ranks last agreed on, without the average under way that no longer arrives.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from lightning_pipesync import LocalSGD, SelSync
from lightning_pipesync.methods.replicas.weights import Weights
from tests.support.harness import DIED, assert_raised, launch, raised
from tests.support.lost_ranks import be_patient, die
from tests.support.models import Run

#: Far more than the test takes.
TIMEOUT_S = 300
VICTIM = 2

OUTER: dict[str, Any] = {"period": 4, "outer_optimizer": "nesterov"}
#: By name: the method, its settings, and the number of ranks.
CASES: dict[str, tuple[type, dict[str, Any], int]] = {
    "DiLoCo in int8": (LocalSGD, {**OUTER, "compression": "int8"}, 3),
    "overlapped": (LocalSGD, {**OUTER, "overlap_steps": 2}, 3),
    "streaming": (LocalSGD, {**OUTER, "overlap_steps": 3, "fragments": 2, "bucket_mb": 2e-4}, 3),
    "SelSync": (SelSync, {"delta": 0.0, "overlap": "forward", "outer_lr": 0.7, "outer_momentum": 0.9}, 3),
    "averages": (LocalSGD, {"period": 4, "overlap_steps": 2}, 3),
    "ring": (LocalSGD, {"neighbors": "ring", "period": 1}, 4),
    "pairs": (LocalSGD, {"neighbors": "random_pairs", "period": 1}, 4),
    "groups": (LocalSGD, {"ranks_per_replica": 2, "period": 4}, 4),
}


class DyingOuterStep:
    """The outer step of a rank that dies in its ``last`` one: others have its gradient, and not yet its weights."""

    def __init__(self, last: int) -> None:
        self.left, self.step = last, Weights._outer_step

    def __call__(self, *args: Any) -> None:
        self.left -= 1
        if self.left == 0:
            time.sleep(0.5)  # what it has sent is on its way
            die()
        self.step(*args)


def has_outer(name: str) -> bool:
    return "outer_optimizer" in CASES[name][1] or "outer_lr" in CASES[name][1]


def train_until_lost(name: str) -> dict[str, Any]:
    method, settings, _ = CASES[name]
    be_patient()
    run = Run(method, timeout_s=TIMEOUT_S, **settings)
    buckets = run.sync._replicas[0].averages.buckets
    if dist.get_rank() == VICTIM and has_outer(name):
        dying = DyingOuterStep(len(buckets) + 1)
        Weights._outer_step = lambda *args: dying(*args)  # type: ignore[method-assign]
    found: dict[str, Any] = {}

    def train() -> None:
        for i in range(100):
            found["before"] = copy.deepcopy(run.sync.state_dict())
            if dist.get_rank() == VICTIM and not has_outer(name) and i == 9:
                die()
            run.step(i)

    found["error"] = raised(train)
    found["flats"] = [bucket.global_flat.clone() for bucket in buckets if bucket.global_flat is not None]
    found["after"], found["again"] = run.sync.state_dict(), run.sync.state_dict()
    found["weights"] = [[t.detach().clone() for t in bucket.tensors] for bucket in buckets]
    found["flush"] = raised(run.sync.flush)
    run.sync.detach()
    return found


def by_path(tree: Any) -> dict[str, Tensor]:
    leaves = tree_flatten_with_path(tree)[0]
    return {keystr(path): leaf for path, leaf in leaves if isinstance(leaf, Tensor)}


def differing(one: Any, other: Any) -> list[str]:
    others = by_path(other)
    return [path for path, leaf in by_path(one).items() if not torch.equal(leaf, others.pop(path))] + [*others]


@pytest.mark.parametrize("name", CASES)
def test_the_state_is_the_one_before_the_average_that_is_lost(name: str) -> None:
    outcomes = launch(train_until_lost, CASES[name][2], name, may_die=(VICTIM,), mostly_wait=True)
    assert outcomes.pop(VICTIM) == DIED
    agreed = []
    for found in outcomes:
        for error in (found["error"], found["flush"]):
            assert_raised(error, "RuntimeError", f"Rank {VICTIM} ")
            assert "has died" in error[1].splitlines()[-1]
        before, after = (found[key]["replicas"][0]["weights"] for key in ("before", "after"))
        for fragment in after["flights"].keys() & before["flights"].keys():  # others have arrived in between
            assert not differing(after["flights"][fragment], before["flights"][fragment])
        assert not differing(found["weights"], [bucket["own"] for bucket in after["buckets"]])
        kept, kept_before = (
            {key: [bucket[key] for bucket in found["buckets"] if key in bucket] for key in ("global", "outer")}
            for found in (after, before)
        )
        assert not differing(kept, kept_before)
        assert not differing(found["again"], found["after"])
        if has_outer(name):
            assert by_path(kept["outer"]), "the outer step has a momentum"
            agreed.append(kept["global"])
            if "int8" not in name:
                torn = zip(found["flats"], kept["global"], strict=True)
                assert any(not torch.equal(flat, common) for flat, common in torn), "the loss was within the outer step"
    assert not agreed or not differing(*agreed), "all survivors agree"
