"""Plans: predictions from measured costs, for other clusters, too; and the command, on two ranks."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipesync.cli import main
from lightning_pipesync.lab.bench import benchmark
from lightning_pipesync.lab.netlab import network
from lightning_pipesync.lab.plan.predictions import enough_accumulation, enough_bandwidth, fastest, predict
from lightning_pipesync.lab.plan.report import as_markdown
from lightning_pipesync.lab.plan.saved import of_result, read_plan
from lightning_pipesync.lab.plan.trials import to_prove
from lightning_pipesync.lab.plan.verdict import verdict_of
from lightning_pipesync.lab.plan.work import slowest
from lightning_pipesync.lab.predictions.cluster import BackendCost, Cluster, MeasuredCost
from lightning_pipesync.lab.predictions.dear import half_seconds, step_seconds, topologies_of
from lightning_pipesync.lab.predictions.limits import LayerTimes
from lightning_pipesync.lab.predictions.work import LayerWork, MethodWork, Profile, Work, predict_ddp
from lightning_pipesync.methods.dear.config import DeARConfig
from lightning_pipesync.training.registry import METHODS
from tests.support.own_methods import OWN

MIB = 2**20
#: 16 layers of a MiB; a step of 100 ms.
PROFILE = Profile(
    forward=0.03,
    backward=0.06,
    update=0.01,
    tensors=[LayerTimes(0.06 * (i + 1) / 16, 0.03 * (15 - i) / 16, MIB) for i in range(16)],
)
#: As that of a model that has no layers of its own to be cut at; in shards, four of them are a group of FSDP2's.
WORK = Work(PROFILE, groups=[4 * MIB] * 4)


def cluster(bandwidth: float, world_size: int = 4, **errors: float) -> Cluster:
    link = MeasuredCost(1e-4, 1 / bandwidth, **errors)
    backend = BackendCost(1e-4, 1 / bandwidth, **errors, ring_up_to=16)
    int8 = MeasuredCost(1e-4, 0.25 / bandwidth + 1e-10)
    by_codec = {"none": link, "int8": int8}
    exchanges = {"averages": by_codec, "push and pull": {"none": link}}
    return Cluster(world_size, bandwidth, backend, link, by_codec, exchanges)


def by_method(found: Any) -> dict[str, Any]:
    """By title, which tells the variants of a method from each other."""
    return {one.title: one for one in sorted(found, key=lambda one: -one.seconds)}  # the fastest one stays


# --- predictions ------------------------------------------------------------------------------------------------------


def test_predictions_are_those_of_the_cost_models() -> None:
    """At 100 MB/s an all-reduce of 16 MiB takes 250 ms among 4 ranks, of which DDP hides 60."""
    at = cluster(1e8)
    found = by_method(predict(WORK, at))
    all_reduce = at.backend.all_reduce(16 * MIB, 4)
    assert all_reduce == pytest.approx(0.252, abs=0.001)
    ddp = found["ddp"]
    assert ddp.seconds == predict_ddp(PROFILE, at.backend, 4, ddp.settings["bucket_mb"])
    assert 0.04 + all_reduce < ddp.seconds < 0.04 + 1.05 * all_reduce + 0.004
    assert all_reduce < found["dear"].seconds < ddp.seconds
    assert ddp.exact
    assert found["dear"].exact
    assert found["pipe_sgd"].seconds == pytest.approx(0.1)  # int8 hides under a step
    assert found["selsync"].seconds == pytest.approx(0.1 + 0.1 * all_reduce)
    works = at.exchanges["averages"]["int8"].all_reduce(16 * MIB, 4) - at.seconds_on_wire(16 * MIB, "int8")
    assert found["local_sgd"].seconds == pytest.approx(0.1 + works / 4)  # four averages, each under four steps


def test_settings_that_train_better_go_first() -> None:
    """Where they hardly wait: no codec, short periods, few local steps."""
    for bandwidth, codec, period, lssr in ((1e10, None, 4, 0.5), (1e8, "int8", 64, 0.9), (1e7, "int8", 64, 0.9)):
        found = predict(WORK, cluster(bandwidth))
        settings = {one.method: one.settings for one in reversed(found)}  # of local SGD the one without a codec
        assert settings["pipe_sgd"].get("compression") == codec
        assert settings["local_sgd"]["period"] == period
        assert settings["selsync"]["lssr"] == lssr
        for one in found:
            if one.method in METHODS:
                METHODS[one.method].config_type(**one.settings)


@pytest.mark.parametrize("num_stages", [2, 4])
def test_a_pipeline_is_as_fast_as_its_slowest_stage(num_stages: int) -> None:
    """Of 8 layers with an eighth of the passes each, and 1 MB between two."""
    layers = [LayerWork(0.01, MIB, 10**6) for _ in range(8)]
    work = replace(WORK, measured={"ea_pipe": MethodWork(layers=layers)})

    def seconds(bandwidth: float) -> float:
        return by_method(predict(work, cluster(bandwidth, num_stages)))["ea_pipe"].seconds

    assert seconds(1e9) == pytest.approx(work.seconds)
    both_ways = 1 if num_stages == 2 else 2  # a stage between two others sends activations on and gradients back
    assert seconds(1e6) == pytest.approx(num_stages * both_ways)
    assert "ea_pipe" not in by_method(predict(work, cluster(1e9, 9)))
    longer = replace(work, added={"ea_pipe": 0.02})
    assert by_method(predict(longer, cluster(1e9, num_stages)))["ea_pipe"].seconds == pytest.approx(work.seconds + 0.02)


def test_what_a_method_adds_delays_its_gradients() -> None:
    longer = replace(WORK, added={"ddp": 0.016, "pipe_sgd": 0.01}, measured={"pipe_sgd": MethodWork(0.005)})
    assert longer.profile_with("dear") == PROFILE
    delayed = longer.profile_with("ddp")
    assert delayed.backward == pytest.approx(0.076)
    assert [b.ready - a.ready for a, b in zip(PROFILE.tensors, delayed.tensors, strict=True)] == pytest.approx(
        [0.001 * i for i in range(1, 17)]
    )
    found = by_method(predict(longer, cluster(1e11)))
    assert found["ddp"].seconds == pytest.approx(0.116, rel=0.01)
    assert found["pipe_sgd"].seconds == pytest.approx(0.115)
    assert found["local_sgd"].seconds == pytest.approx(0.1, rel=0.01)


def test_rows_of_a_torus_are_the_ranks_of_a_host() -> None:
    """Of 4 hosts with 8 ranks each 7 messages in a row and 3 in a column follow each other, as a strategy runs them."""
    at = replace(cluster(1e8, 32), torus_columns=8)
    seconds = half_seconds(at, "torus2d", MIB)
    assert seconds == pytest.approx((7 + 3) * 1e-4 + 31 / 32 * MIB / 1e8)
    assert by_method(predict(WORK, at))["dear"].settings == {"topology": "torus2d", "torus_columns": 8}
    assert half_seconds(at.with_hosts(64), "torus2d", MIB) == pytest.approx((7 + 7) * 1e-4 + 63 / 64 * MIB / 1e8)
    assert topologies_of(at.with_hosts(36)) == ["flat"], (
        "no whole hosts; trees would cross the link of each more than once"
    )
    assert topologies_of(cluster(1e8, 32)) == ["flat", "torus2d", "tree"]


def test_low_rank_is_planned_with_what_its_factors_cost() -> None:
    """16 matrices of 512 x 512, of which factors have a 128th of the values on average; and 8 ms of products."""
    tensors = [replace(one, shape=(512, 512)) for one in PROFILE.tensors]
    work = Work(replace(PROFILE, tensors=tensors), measured={"dear": MethodWork(low_rank_seconds=0.008)})
    at = cluster(1e7)
    found = {one.title: one for one in predict(work, at)}
    low_rank, exact = found["dear (low_rank=4)"], found["dear"]
    assert exact.exact
    assert not low_rank.exact
    assert low_rank.settings == {"topology": "torus2d", "low_rank": 4}
    DeARConfig(**low_rank.settings)
    of_the_last = 2 * half_seconds(at, "torus2d", MIB / 128)
    assert low_rank.seconds == pytest.approx(0.108 + of_the_last)
    slow = {one.title: one for one in predict(work, cluster(1e5))}["dear (low_rank=4)"]
    assert slow.seconds == pytest.approx(16 * MIB / 128 * 1.5 / 1e5, rel=0.1)
    assert fastest(work, at)["dear"] > 2.0
    assert "dear (low_rank=4)" not in {one.title for one in predict(WORK, at)}


def test_dear_is_planned_with_a_codec_in_both_halves() -> None:
    """Which is no variant of the exact training, and keeps the network busy for as long as its all-reduces take."""
    for bandwidth in (1e6, 1e7):
        at = cluster(bandwidth)
        at = replace(at, all_reduces={**at.all_reduces, "int4": MeasuredCost(1e-4, 0.13 / bandwidth + 1e-10)})
        found = by_method(predict(WORK, at))
        exact, planned = found["dear"], found["dear (compression=int4)"]
        assert exact.exact
        assert not planned.exact
        assert DeARConfig(**planned.settings).compression == "int4"
        on_network = at.all_reduces["int4"].all_reduce(16 * MIB, 4)
        assert on_network < planned.seconds < on_network + 0.1
        assert planned.seconds < 0.3 * exact.seconds
    assert "dear (compression=int4)" not in by_method(predict(WORK, cluster(1e7)))


def test_a_fast_network_leaves_nothing_to_gain() -> None:
    found = by_method(predict(WORK, cluster(1e11)))
    for one in found.values():
        assert one.seconds == pytest.approx(0.1, rel=0.06), one.name
    verdict = verdict_of(list(found.values()), {}, WORK.seconds)
    assert verdict.exact is found["ddp"]
    assert verdict.other is None


def test_from_where_on_ddp_is_enough() -> None:
    at = cluster(1e8)
    enough = enough_bandwidth(WORK, at)
    assert enough is not None
    assert by_method(predict(WORK, at.with_bandwidth(1.01 * enough)))["ddp"].seconds <= 0.1 / 0.95
    assert by_method(predict(WORK, at.with_bandwidth(0.9 * enough)))["ddp"].seconds > 0.1 / 0.95
    slow = replace(at, backend=BackendCost(1.0, 1e-8))
    assert enough_bandwidth(WORK, slow) is None, "latency remains"
    certain, uncertain = (by_method(predict(WORK, one))["ddp"] for one in (at, cluster(1e8, beta_error=1e-9)))
    assert uncertain.seconds == certain.seconds
    assert (certain.error, uncertain.error) == (0, pytest.approx(0.1 * 0.252, rel=0.1)), "errors are carried along"
    batches = enough_accumulation(WORK, at)
    assert batches == 64  # 190 ms bare in 64 * 90
    assert enough_accumulation(WORK, cluster(1e11)) == 1
    assert enough_accumulation(WORK, cluster(4e7)) is None, "a batch that is 128 times as large is no way out"


def test_ddp_is_also_proven_with_its_default_buckets() -> None:
    """Each method is run once."""
    predictions = [one for one in predict(WORK, cluster(1e7)) if one.method != "averaging"]  # another test's
    chosen = to_prove(predictions, lambda one: True)
    assert [one.method for one in chosen] == ["ddp", "ddp", "dear", "local_sgd", "selsync"]
    assert chosen[0].settings["bucket_mb"] < chosen[1].settings["bucket_mb"] == 25
    assert chosen[2].settings == {"topology": "torus2d"}
    assert chosen[3].seconds <= chosen[4].seconds


def test_the_next_best_is_run_where_one_cannot() -> None:
    """Of methods that are not exact; DDP has no next."""
    predictions = [one for one in predict(WORK, cluster(1e7)) if one.method != "averaging"]  # another test's
    first = to_prove(predictions, lambda one: True)
    second = to_prove(predictions, lambda one: one not in (first[2], first[3]))
    assert [one.method for one in second] == ["ddp", "ddp", "local_sgd", "selsync"]
    assert second[2].seconds >= first[3].seconds
    without = to_prove(predictions, lambda one: one.method not in ("ddp", "local_sgd"))
    assert [one.method for one in without] == ["dear", "selsync", "pipe_sgd"]


# --- of replicas in shards --------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("hosts", [15, 16])
def test_many_workers_are_told_to_try_local_steps_first(hosts: int) -> None:
    found = by_method(predict(WORK, cluster(1e8).with_hosts(hosts)))
    told = {name: "lost quality" in one.why for name, one in found.items()}
    assert {name for name in told if told[name]} == ({"selsync", "local_sgd"} if hosts == 16 else set())


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


# --- for other clusters -----------------------------------------------------------------------------------------------


def test_a_torus_saves_latency() -> None:
    at = replace(cluster(1e9, world_size=1024), halves=MeasuredCost(1e-3, 1e-9))
    assert at.halves.torus_half(MIB, 32, 32) == pytest.approx(62e-3 + MIB * 1023 / 1024 * 1e-9)
    assert at.halves.reduce_scatter(MIB, 1024) == pytest.approx(1023e-3 + MIB * 1023 / 1024 * 1e-9)
    assert fastest(WORK, at)["dear"] < 0.5 * min(step_seconds(PROFILE, at, size) for size in WORK.bucket_sizes())


def test_servers_gain_where_a_host_is_slow() -> None:
    """With one of 4 ranks at half speed, as many steps take 4 / 3.5 times as long, not twice."""
    half = Profile(0.06, 0.12, 0.02, PROFILE.tensors)
    measured = [{"pipe_sgd": MethodWork(seconds, low_rank_seconds=seconds)} for seconds in (0.001, 0.0002)]
    everyones = [Work(PROFILE, measured[0]), Work(PROFILE), Work(half, measured[1]), Work(PROFILE)]
    work = slowest(everyones)
    assert work.profile is half
    assert work.measured == measured[0]
    assert work.pace == pytest.approx(4 / 3.5 / 2)
    seconds = fastest(work, cluster(1e11))
    assert seconds["parameter_server"] == pytest.approx(0.1143, rel=0.01)
    assert seconds["ddp"] == pytest.approx(0.2, rel=0.01)


def test_a_latency_takes_the_place_of_the_measured_one_in_each_message() -> None:
    """Of alpha, 0.1 ms, 0.04 ms are latency: the rest is what processors do."""
    at = cluster(1e8)
    far = at.with_latency(40e-3, 4e-5)
    assert far.latency == 40e-3
    exchanges = [(at.exchanges[name]["none"], far.exchanges[name]["none"]) for name in at.exchanges]
    for before, after in ((at.backend, far.backend), (at.halves, far.halves), *exchanges):
        assert after.alpha == pytest.approx(before.alpha + 40e-3 - 4e-5)
        assert after.beta == before.beta
    more = at.backend.all_reduce(MIB, 4)
    assert far.backend.all_reduce(MIB, 4) == pytest.approx(more + 6 * (40e-3 - 4e-5)), "6 messages follow each other"
    assert at.with_latency(4e-5, 4e-5).backend.alpha == at.backend.alpha
    assert at.with_latency(0.0, 1.0).backend.alpha == 0.0, "noise, which makes no message arrive before it is sent"
    steps = [by_method(predict(WORK, one)) for one in (at, far)]
    assert steps[1]["ddp"].seconds > steps[0]["ddp"].seconds + 0.2
    assert steps[1]["local_sgd"].seconds < 0.5 * steps[1]["ddp"].seconds


# --- the command ------------------------------------------------------------------------------------------------------


def small_model() -> Any:
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
    return module, torch.ones(4, 64), lambda module, batch: module(batch).square().mean()


def no_model() -> Any:
    return nn.Linear(1, 1)


def broken_model() -> Any:
    return nn.Linear(8, 8), torch.ones(4, 7), lambda module, batch: module(batch).sum()


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("broken_model", "rank 0: RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x7 and 8x8)"),
        ("no_model", "returned Linear: return (module, batch, loss)"),
    ],
)
@pytest.mark.usefixtures("forked_ranks")
def test_a_model_that_cannot_be_measured_has_no_plan(
    model: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says why, and nothing is written."""
    assert main(["plan", "--model", f"tests.quick.lab.test_plan:{model}", "--output", str(tmp_path / "plan")]) == 2
    (line,) = (one for one in capsys.readouterr().err.splitlines() if one.startswith("pipesync: error: "))
    assert "cannot be measured, so that there is no plan." in line
    assert said in line
    assert not (tmp_path / "plan").exists()


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("trian:for_plan", "ModuleNotFoundError: No module named 'trian'. Did you mean 'train'? Give MODULE:FUNCTION."),
        (
            "train:for_plna",
            "module 'train' has no attribute 'for_plna'. Did you mean 'for_plan'? Give MODULE:FUNCTION.",
        ),
        ("train_needs:for_plan", "ModuleNotFoundError: No module named 'trains'. Give MODULE:FUNCTION."),
        ("nets.trian:for_plan", "No module named 'nets.trian'. Did you mean 'nets.train'? Give MODULE:FUNCTION."),
        ("transfomer", "Did you mean 'transformer'?"),
    ],
)
def test_a_typo_in_the_model_is_told_before_anything_starts(
    model: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("def for_plan(): ...")
    (tmp_path / "train_needs.py").write_text("import trains")
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "train", raising=False)
    monkeypatch.setattr(benchmark, "run_on", lambda *_: pytest.fail("it started ranks"))
    assert main(["plan", "--model", model]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words", [["plan"], ["bench", "step"]])
def test_what_cannot_be_is_told_before_anything_is_measured(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that cannot be written to, tasks of srun of which each would plan for itself, a launcher's links."""
    (tmp_path / "file").touch()
    assert main([*words, "--output", str(tmp_path / "file" / "plan")]) == 2
    said = capsys.readouterr().err
    assert f"output={str(tmp_path / 'file' / 'plan')!r} cannot be written to: Not a directory." in said
    if words == ["plan"]:
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "64")
        assert main(words) == 2
        assert "srun has started 64 tasks of this command" in (said := capsys.readouterr().err)
        assert "srun --ntasks-per-node=1 torchrun" in said
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(network, "enter_user_namespace", lambda: pytest.fail("it has no way to the others"))
    monkeypatch.setattr("sys.argv", ["pipesync", *words, "--rate", "1gbit"])
    assert main() == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "1gbit: these links are of an emulated network, and a launcher has started this rank" in said


@pytest.mark.usefixtures("forked_ranks")
def test_two_ranks_are_measured_and_told_what_to_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the user's own model, of which nothing is run; what is read again is the same plan, also for other hosts."""
    words = ["--model", "tests.quick.lab.test_plan:small_model", "--steps", "1", "--rounds", "0"]
    assert main(["plan", *words, "--output", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    written = (tmp_path / "plan.md").read_text()
    assert as_markdown(*read_plan(tmp_path / "plan.json")) == written
    assert f"In {tmp_path}: plan.json, plan.md, plan.png." in said
    assert written.split("\n")[0] in said
    (result,) = json.loads((tmp_path / "plan.json").read_text())["results"]
    work, at, _ = of_result(result)
    assert work.num_bytes == 4 * (64 * 64 + 64 + 64 + 1)
    assert at.world_size == 2
    exact = verdict_of(predict(work, at), {}, work.seconds).exact
    assert exact is not None
    assert ("Trainer(strategy=DeARStrategy(" in said) == (exact.method == "dear"), "only what is ahead of DDP"
    assert main(["plan", "--from", str(tmp_path / "plan.json"), "--hosts", "64", "--rate", "25gbit"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "on 64 hosts with 25 Gbit/s each" in said
    assert "Extrapolated from 2 hosts" in said
