"""After a loss `state_dict` returns what ranks last agreed on, without the average under way that no longer arrives."""

from __future__ import annotations

import copy
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipesync import LocalSGD, SelSync
from lightning_pipesync.methods.replicas.global_weights import GlobalWeights
from tests.nightly.faults.test_failures import RANKS, VICTIM, assert_names, form_group, launch_jobs
from tests.support.harness import DIED, free_port, raised
from tests.support.lost_ranks import be_patient, die
from tests.support.models import Run

#: Far more than the test takes.
TIMEOUT_S = 300

OUTER: dict[str, Any] = {"period": 4, "outer_optimizer": "nesterov"}
CASES: dict[str, tuple[type, dict[str, Any]]] = {
    "DiLoCo": (LocalSGD, OUTER),
    "DiLoCo in int8": (LocalSGD, {**OUTER, "compression": "int8"}),
    "overlapped": (LocalSGD, {**OUTER, "overlap_steps": 2}),
    "streaming": (LocalSGD, {**OUTER, "overlap_steps": 3, "fragments": 2, "bucket_mb": 2e-4}),
    "under the forward pass": (SelSync, {"delta": 0.0, "overlap": "forward", "outer_lr": 0.7, "outer_momentum": 0.9}),
    "averages": (LocalSGD, {"period": 4, "overlap_steps": 2}),
}


class DyingOuterStep:
    """The outer step of a rank that dies in its ``last`` one: others have its gradient, and not yet its weights."""

    def __init__(self, last: int) -> None:
        self.left, self.step = last, GlobalWeights._outer_step

    def __call__(self, *args: Any) -> None:
        self.left -= 1
        if self.left == 0:
            time.sleep(0.5)  # what it has sent is on its way
            die()
        self.step(*args)


def train_until_lost(jobs: dict[str, int]) -> dict[str, Any]:
    name, rank = form_group(jobs)
    method, settings = CASES[name]
    be_patient()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    run = Run(method, timeout_s=TIMEOUT_S, **settings)
    found: dict[str, Any] = {}
    has_outer = name != "averages"
    if rank == VICTIM and has_outer:
        number = len(run.sync._units[0].replicas.tensors)
        dying = DyingOuterStep(number + 1)
        GlobalWeights._outer_step = lambda *args: dying(*args)  # type: ignore[method-assign]

    def train() -> None:
        for i in range(100):
            found["before"] = copy.deepcopy(run.sync.state_dict())
            if rank == VICTIM and not has_outer and i == 8:
                die()
            run.step(i)

    found["error"] = raised(train)
    found["flats"] = [flat.clone() for flat in run.sync._units[0].replicas.global_weights.flats]
    found["after"], found["again"] = run.sync.state_dict(), run.sync.state_dict()
    found["weights"] = [[t.detach().clone() for t in tensors] for tensors in run.sync._units[0].replicas.tensors]
    found["flush"] = raised(run.sync.flush)
    run.sync.detach()
    return found


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[Any]]:
    jobs = {name: free_port() for name in CASES}
    may_die = tuple(RANKS * job + VICTIM for job in range(len(jobs)))
    return launch_jobs(train_until_lost, jobs, may_die=may_die)


def in_order(tree: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def of_fragments(state: dict[str, Any]) -> dict[str, Any]:
    fragments: dict[str, Any] = state["units"][0]["fragments"]
    return fragments


@pytest.mark.parametrize("name", CASES)
def test_the_state_is_the_one_before_the_average_that_is_lost(name: str, outcomes: dict[str, list[Any]]) -> None:
    assert outcomes[name][VICTIM] == DIED
    agreed = []
    for rank, found in enumerate(outcomes[name]):
        if rank == VICTIM:
            continue
        for error in (found["error"], found["flush"]):
            assert error is not None
            assert_names(error[1], VICTIM, "killed", TIMEOUT_S)
        before, after = (of_fragments(found[key]) for key in ("before", "after"))
        for fragment in after["flights"].keys() & before["flights"].keys():  # others have arrived in between
            flights = (in_order(state["flights"][fragment]) for state in (after, before))
            for now, then in zip(*flights, strict=True):
                assert torch.equal(now, then)
        for mine, saved in zip(in_order(found["weights"]), in_order(after["replicas"]["own"]), strict=True):
            assert torch.equal(mine, saved)
        kept = {key: value for key, value in after["replicas"].items() if key in ("common", "outer")}
        for now, then in zip(in_order(kept), in_order({key: before["replicas"][key] for key in kept}), strict=True):
            assert torch.equal(now, then)
        if name != "averages":
            assert "common" in kept
            assert in_order(kept["outer"]), "the outer step has a momentum"
            agreed.append(after["replicas"]["common"])
            if "int8" not in name:
                torn = zip(found["flats"], after["replicas"]["common"], strict=True)
                assert any(not torch.equal(flat, common) for flat, common in torn), "the loss was within the outer step"
        for one, other in zip(in_order(found["again"]), in_order(found["after"]), strict=True):
            assert torch.equal(one, other)
    for one, other in zip(*agreed, strict=True) if agreed else ():
        assert torch.equal(one, other), "all survivors agree"
