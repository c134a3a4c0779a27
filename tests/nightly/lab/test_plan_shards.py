"""Plans for replicas that FSDP2 shards: HSDP is the baseline, and each rank sends its shard over a shared link."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from lightning_pipesync.cli import main
from lightning_pipesync.core.work import Work
from lightning_pipesync.lab.bench.models import EMULATED
from lightning_pipesync.lab.plan.measure import measure_plan
from lightning_pipesync.lab.plan.model import PlanSettings
from lightning_pipesync.lab.plan.picture import draw
from lightning_pipesync.lab.plan.predictions import enough_bandwidth, predict
from lightning_pipesync.lab.plan.replicas import Replicas
from lightning_pipesync.lab.plan.report import as_markdown
from lightning_pipesync.lab.plan.saved import Elsewhere, of_result, read_plan
from lightning_pipesync.lab.plan.verdict import verdict_of
from tests.nightly.benchmarks.bench_runs import assert_pictures
from tests.nightly.lab.test_plan import MIB, PROFILE, by_method, cluster
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import raised
from tests.support.own_methods import OWN

#: Of PROFILE's 16 layers of a MiB on each rank, four are a group of FSDP2's.
WORK = Work(PROFILE, groups=[4 * MIB] * 4)
BLOCKS, WIDTH = 3, 64


def between(bandwidth: float, overlaps: bool = False) -> Any:
    """Hosts with eight ranks, each of which has ``bandwidth``; there are no parameter servers."""
    at = cluster(bandwidth)
    exchanges = {"averages": at.exchanges["averages"]}
    return replace(at, ranks_per_replica=8, hsdp_overlaps=overlaps, exchanges=exchanges)


def test_every_method_is_predicted_beside_hsdp() -> None:
    """On five hosts, of which no torus can be made."""
    at = between(1e8).with_hosts(5)
    found = by_method(predict(WORK, at))
    assert set(found) & {"hsdp", *OWN} == {"hsdp", "dear", "pipe_sgd", "selsync", "local_sgd"}
    each = at.backend.all_reduce(4 * MIB, 5)
    assert found["hsdp"].seconds == pytest.approx(0.1 + 4 * each)
    whole = by_method(predict(WORK, cluster(1e8).with_hosts(5)))
    for method in set(found) - {"hsdp"}:
        assert found[method].seconds == whole[method].seconds, "what a rank sends is its own shard"


def test_no_torus_is_planned_which_replicas_in_shards_refuse() -> None:
    for hosts in (4, 8, 64):
        settings = [one.settings for one in predict(WORK, replace(between(1e8), has_trees=False).with_hosts(hosts))]
        assert {one["topology"] for one in settings if "topology" in one} == set()
        whole = [one.settings for one in predict(WORK, cluster(1e8).with_hosts(hosts))]
        assert "torus2d" in {one.get("topology") for one in whole}


def test_on_a_gpu_the_all_reduces_of_hsdp_run_under_the_backward_pass() -> None:
    """Each begins once its group's last gradient is ready, and they follow each other."""
    slow, fast = between(1e8, overlaps=True), between(1e10, overlaps=True)
    each = slow.backend.all_reduce(4 * MIB, 4)
    assert each > 0.015
    assert by_method(predict(WORK, slow))["hsdp"].seconds == pytest.approx(0.03 + 0.015 + 4 * each + 0.01)
    each = fast.backend.all_reduce(4 * MIB, 4)
    assert each < 0.015
    assert by_method(predict(WORK, fast))["hsdp"].seconds == pytest.approx(0.1 + each)


def test_links_are_those_of_hosts() -> None:
    at = between(1e8)
    assert at.host_bandwidth == 8e8
    assert at.with_bandwidth(1.6e9).bandwidth == 2e8
    enough = enough_bandwidth(WORK, at)
    assert enough is not None
    at_most = by_method(predict(WORK, at.with_bandwidth(1.01 * enough)))["hsdp"].seconds
    assert WORK.seconds >= 0.95 * at_most
    assert WORK.seconds < 0.95 * by_method(predict(WORK, at.with_bandwidth(0.99 * enough)))["hsdp"].seconds


def test_the_plan_says_hsdp_and_what_to_type(tmp_path: Path) -> None:
    at = between(1e7)
    result = {
        "settings": {"model": "Net"},
        "world_size": 4,
        "cluster": asdict(at),
        "work": asdict(WORK),
        "codecs": {},
        "findings": [],
        "changes": [],
        "measured": {},
    }
    work, at, result = of_result(json.loads(json.dumps(result)))
    text = as_markdown(work, at, result)
    assert text.startswith("Try dear:")
    said = " ".join(text.split())
    assert "on 4 hosts of 8 ranks, which share a replica, with 640 Mbit/s each" in said
    assert "gradients 128 MiB" in said
    assert "times HSDP" in said
    assert "DDP" not in text
    assert 'fully_shard(model, mesh=mesh["shards"])' in text
    assert 'replicas=mesh["replicas"]' in text
    assert "DeARStrategy(" in text
    assert "ranks_per_replica=8" in text
    assert all(len(line) <= 80 for line in text.splitlines())
    draw(work, at, result, tmp_path / "plan.png")
    assert_pictures(tmp_path, "plan")
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"kind": "plan", "results": [result]}))
    _, faster, _ = read_plan(path, Elsewhere(rate="6.4gbit"))
    assert faster.host_bandwidth == pytest.approx(8e8)
    hsdp = [one for one in predict(work, faster) if one.method == "hsdp"]
    assert verdict_of(hsdp, {}).sentences[0].startswith("Nothing is surely ahead of HSDP:")


# --- measurements -----------------------------------------------------------------------------------------------------


def net(mesh: DeviceMesh) -> Any:
    """What a user's function makes: blocks and a head, each a group of FSDP2's."""
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(BLOCKS)]
    module = nn.Sequential(*blocks, nn.Linear(WIDTH, 2))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module, torch.ones(4, WIDTH), lambda module, batch: module(batch).square().mean()


def whole_net(mesh: DeviceMesh) -> Any:
    return nn.Linear(2, 2), torch.ones(1, 2), lambda module, batch: module(batch).sum()


def net_without_mesh() -> Any:
    return whole_net(None)  # type: ignore[arg-type]


def plan(model: str, rounds: int = 1) -> dict[str, Any]:
    settings = PlanSettings(model, scale=1e-3, compute_ms=3.0, steps=1, rounds=rounds, ranks_per_replica=2)
    return measure_plan(settings, lambda _: None)


CASES = {
    "net": partial(plan, "tests.nightly.lab.test_plan_shards:net"),
    "emulated": partial(plan, f"{EMULATED}alexnet", rounds=0),
    "whole": partial(plan, "tests.nightly.lab.test_plan_shards:whole_net"),
    "no mesh": partial(plan, "tests.nightly.lab.test_plan_shards:net_without_mesh"),
    "three": partial(raised, partial(Replicas.of, 3)),
}


@pytest.fixture(scope="module")
def runs() -> Outcomes:
    return launch_cases(CASES, 4)


def test_a_plan_is_measured_on_two_replicas_of_two_ranks(runs: Outcomes) -> None:
    results = runs["net"]
    assert "error" not in results[0], results[0]["error"]
    work, at, result = of_result(results[0])
    numel = BLOCKS * (WIDTH * WIDTH + WIDTH) + 2 * WIDTH + 2
    assert work.num_bytes == 2 * numel
    assert sorted(work.groups) == [2 * (2 * WIDTH + 2), *[2 * (WIDTH * WIDTH + WIDTH)] * BLOCKS]
    assert (at.world_size, at.ranks_per_replica, at.torus, at.hsdp_overlaps) == (2, 2, None, False)
    assert [tensor.needed for tensor in work.profile.tensors if tensor.needed > 0]
    assert set(at.exchanges) == {"averages"}, "parameter servers refuse shards"
    measured = {name.partition(":")[0] for name, outcome in result["measured"].items() if "seconds" in outcome}
    assert {"hsdp", "dear"} < measured, result["measured"]
    assert not measured & {"ddp", "ea_pipe", "parameter_server"}
    assert all(one["predictions"] == result["predictions"] for one in results), "the same on all ranks"
    assert "HSDP" in as_markdown(work, at, result)


def test_a_network_of_the_benchmarks_is_sharded_by_its_layers(runs: Outcomes) -> None:
    work, _, result = of_result(runs["emulated"][0])
    assert len(work.groups) > 1
    assert sum(work.groups) == work.num_bytes
    assert not result["measured"]
    assert {one["method"] for one in result["predictions"]} >= {"hsdp", "dear", "local_sgd"}


def test_what_is_not_in_shards_is_refused_on_all_ranks(runs: Outcomes) -> None:
    for case, words in (("whole", "is not sharded: with ranks_per_replica=2"), ("no mesh", "it takes no mesh")):
        for outcome in runs[case]:
            assert words in outcome["error"]
    for kind, message in runs["three"]:
        assert kind == "ValueError"
        assert "ranks_per_replica=3 does not divide 4 ranks" in message


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks_per_replica", "2"], "ranks_per_replica=2 needs a launcher"),
        (["--ranks_per_replica", "0"], "ranks_per_replica must be at least 1, got 0"),
        (["--ranks_per_replica", "2", "--from", "plan.json"], "ranks_per_replica=2: with --from nothing is measured"),
    ],
)
def test_settings_that_cannot_be_are_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    assert said in capsys.readouterr().err
