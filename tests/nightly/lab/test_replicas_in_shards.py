"""Replicas that FSDP2 shards: what their plans and benchmarks compare is HSDP, and memory is what tensors have."""

from __future__ import annotations

import re
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from benchmarks.hsdp import ALONE
from benchmarks.memory import Memory
from benchmarks.resident_memory import forget_peak, map_tensors, peak_bytes, present_bytes
from benchmarks.sharded import Sharded
from lightning_pipesync import DeAR
from lightning_pipesync.core.buckets import MIB, Bucket
from lightning_pipesync.lab.bench.candidates import HSDP
from lightning_pipesync.lab.bench.models import EMULATED, build_model
from lightning_pipesync.lab.plan.measure import measure_plan
from lightning_pipesync.lab.plan.model import PlanSettings, Replicas, device_mesh
from lightning_pipesync.lab.plan.report import as_markdown
from lightning_pipesync.lab.plan.saved import of_result
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import assert_raised, launch, raised

METHODS = ("dear:bucket_mb=2", "local_sgd:period=2")
BLOCKS, WIDTH = 3, 64


def trained() -> dict[str, list[Tensor]]:
    """Returns the weights of this rank's shards after some steps, by candidate."""
    benchmark = Sharded(methods=(), bucket_mb=(0.1, 2.0))
    weights = {}
    for make in benchmark.makers(device_mesh(2)):
        torch.manual_seed(0)
        candidate = make(build_model("transformer"))
        for _ in range(3):
            candidate.step()
        weights[candidate.name] = [p.to_local().clone() for p in candidate.model.module.parameters()]  # type: ignore[attr-defined]
    return weights


def bytes_of_buckets() -> tuple[int, int]:
    """Returns the bytes of DeAR's buckets after a step, and when the next forward pass has gathered all weights."""
    mesh = device_mesh(2)
    module, x, loss = net(mesh["shards"])
    sync = DeAR(module, torch.optim.SGD(module.parameters(), lr=0.1), replicas=mesh["replicas"])

    def in_buckets() -> int:
        return sum(bucket.gradients.flat.untyped_storage().nbytes() for bucket in sync._fused.buckets)

    loss(module, x).backward()
    sync.step()
    after_step = in_buckets()
    with torch.no_grad():
        module(x)
    gathered = in_buckets()
    sync.detach()
    return after_step, gathered


def of_tensors() -> tuple[int, int]:
    """Returns what is used more with a tensor of 16 MiB, and the most, with another one of 32 MiB."""
    map_tensors()
    for _ in range(2):  # the first time, memory of the libraries comes on top
        before = present_bytes()
        forget_peak()
        kept = torch.ones(4 * MIB)
        gone = torch.ones(8 * MIB)
        del gone
        used = present_bytes() - before, peak_bytes() - before
        assert kept.nbytes == 16 * MIB
        del kept
    return used


def test_a_bucket_without_memory_is_given_it_again() -> None:
    tensors = [torch.arange(5.0), torch.arange(3.0)]
    bucket = Bucket(tensors, num_shards=3)
    num_bytes = bucket.flat.untyped_storage().nbytes()
    bucket.take_memory()
    bucket.release_memory()
    assert bucket.flat.untyped_storage().nbytes() == 0
    bucket.take_memory()
    assert bucket.flat.untyped_storage().nbytes() == num_bytes
    bucket.pack(tensors)
    assert bucket.flat[:5].tolist() == [0, 1, 2, 3, 4]
    assert bucket.views[1].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model": "emulated-alexnet"}, ["model='emulated-alexnet'", "transformer-14m"]),
        ({"model": "lenet"}, ["model='lenet'", "transformer"]),
        ({"batch_size": 0}, ["batch_size", "0"]),
        ({"ranks_per_replica": 1}, ["ranks_per_replica", "1"]),
        ({"methods": ("dera",)}, ["dera", "dear"]),
    ],
)
def test_memory_refuses(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match=".*".join(map(re.escape, words))):
        Memory(**{"methods": METHODS, **settings})


def net(mesh: DeviceMesh) -> Any:
    """What a user's function makes: blocks and a head, each a group of FSDP2's."""
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(BLOCKS)]
    module = nn.Sequential(*blocks, nn.Linear(WIDTH, 2))
    for block in (*blocks, module):
        fully_shard(block, mesh=mesh)
    return module, torch.ones(4, WIDTH), lambda module, batch: module(batch).square().mean()


def whole_net(mesh: DeviceMesh) -> Any:
    return nn.Linear(2, 2), torch.ones(1, 2), lambda module, batch: module(batch).sum()


def net_without_mesh() -> Any:
    return whole_net(None)  # type: ignore[arg-type]


def plan(model: str, rounds: int = 1) -> dict[str, Any]:
    settings = PlanSettings(model, scale=1e-3, compute_ms=3.0, steps=1, rounds=rounds, ranks_per_replica=2)
    return measure_plan(settings, lambda _: None)


def memory() -> dict[str, Any]:
    return Memory(model="transformer-14m", methods=METHODS, steps=1).measure(lambda text: None)


@pytest.fixture(scope="module")
def runs() -> Outcomes:
    """On new ranks, whose memory nobody has used."""
    cases: dict[Any, Any] = {name: partial(plan, f"{__name__}:{name}") for name in ("net", "whole_net")}
    cases |= {"buckets": bytes_of_buckets}
    cases |= {"no mesh": partial(plan, f"{__name__}:net_without_mesh"), "trained": trained}
    cases |= {"emulated": partial(plan, f"{EMULATED}alexnet", 0), "three": partial(raised, partial(Replicas.of, 3))}
    if sys.platform == "linux":  # which counts the memory of a process
        cases = {"tensors": of_tensors, "memory": memory, **cases}
    return launch_cases(cases, 4, launch=launch)


def test_hsdp_with_overlap_trains_what_hsdp_does(runs: Outcomes) -> None:
    for weights in runs["trained"]:
        hsdp = weights.pop(HSDP)
        alone = weights.pop(ALONE)
        assert len(weights) == 2
        assert not all(map(torch.equal, hsdp, alone))
        for name, values in weights.items():
            assert all(map(torch.equal, values, hsdp)), name


def test_buckets_have_no_memory_while_the_weights_are_gathered(runs: Outcomes) -> None:
    for after_step, gathered in runs["buckets"]:
        assert after_step >= 2 * (BLOCKS * (WIDTH * WIDTH + WIDTH) + 2 * WIDTH + 2), "4 bytes for half the parameters"
        assert not gathered


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts the memory of a process")
def test_memory_of_a_rank_is_that_of_its_tensors(runs: Outcomes) -> None:
    for present, most in runs["tensors"]:
        assert abs(present - 16 * MIB) < MIB
        assert abs(most - 48 * MIB) < MIB
    results = runs["memory"]
    assert all(result["memory"] == results[0]["memory"] for result in results)
    used, numel = results[0]["memory"], results[0]["shard_numel"]
    assert numel == sum(p.numel() for p in build_model("transformer-14m").module.parameters()) // 2
    between, peak = used[HSDP]
    assert 16 * numel <= between < 18 * numel, "weights, gradients, and the state of AdamW"
    assert 24 * numel <= peak, "and the whole gathered weights"
    assert used["dear (bucket_mb=2)"][1] <= 1.1 * peak, "buckets have no memory while the weights are gathered"
    averages = used["local_sgd (period=2)"]
    assert averages[0] < between + 3 * numel, "nor those of averages between them: what is received has half as much"
    assert averages[1] <= 1.1 * peak


def test_a_plan_of_replicas_in_shards(runs: Outcomes) -> None:
    """Two replicas of two ranks: of the user's own model, of a network of the benchmarks; and what is refused."""
    results = runs["net"]
    assert "error" not in results[0], results[0]["error"]
    work, at, result = of_result(results[0])
    assert work.num_bytes == 2 * (BLOCKS * (WIDTH * WIDTH + WIDTH) + 2 * WIDTH + 2)
    assert sorted(work.groups) == [2 * (2 * WIDTH + 2), *[2 * (WIDTH * WIDTH + WIDTH)] * BLOCKS]
    assert (at.world_size, at.ranks_per_replica, at.torus, at.hsdp_overlaps) == (2, 2, None, False)
    assert set(at.exchanges) == {"averages"}, "parameter servers refuse shards"
    measured = {name.partition(":")[0] for name, outcome in result["measured"].items() if "seconds" in outcome}
    assert {"hsdp", "dear"} < measured, result["measured"]
    assert not measured & {"ddp", "ea_pipe", "parameter_server"}
    assert all(one["predictions"] == result["predictions"] for one in results), "the same on all ranks"
    assert "HSDP" in as_markdown(work, at, result)
    work, _, result = of_result(runs["emulated"][0])
    assert sum(work.groups) == work.num_bytes
    assert {one["method"] for one in result["predictions"]} >= {"hsdp", "dear", "local_sgd"}
    for case, words in (("whole_net", "is not sharded: with ranks_per"), ("no mesh", "it takes no mesh")):
        assert all(words in outcome["error"] for outcome in runs[case])
    for outcome in runs["three"]:
        assert_raised(outcome, "ValueError", "ranks_per_replica=3 does not divide 4 ranks")
