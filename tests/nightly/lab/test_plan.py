"""Plans: predictions from measured costs, proofs, and the command."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipesync.cli import main
from lightning_pipesync.core.cluster import BackendCost, Cluster
from lightning_pipesync.core.cost import LinkCost
from lightning_pipesync.core.layer_limits import LayerTimes
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.core.work import LayerWork, MethodWork, Profile, Work
from lightning_pipesync.lab.bench.method_candidate import lab_of
from lightning_pipesync.lab.bench.models import BenchModel
from lightning_pipesync.lab.bench.profile import StepRecorder
from lightning_pipesync.lab.bench.step import predict_ddp
from lightning_pipesync.lab.netlab import user_namespace
from lightning_pipesync.lab.plan.predictions import enough_accumulation, enough_bandwidth, fastest, predict
from lightning_pipesync.lab.plan.report import as_markdown
from lightning_pipesync.lab.plan.saved import of_result, read_plan
from lightning_pipesync.lab.plan.verdict import verdict_of
from lightning_pipesync.lab.plan.work import measure_work
from lightning_pipesync.methods.dear.config import DeARConfig
from lightning_pipesync.methods.dear.lab import half_seconds
from lightning_pipesync.methods.gradients.low_rank import LowRankBucket, LowRankGradients, P, Q
from lightning_pipesync.methods.gradients.low_rank_cost import bytes_sent, measure_products
from lightning_pipesync.training.registry import METHODS
from tests.support.commands import environment, run_together
from tests.support.harness import on_ranks
from tests.support.own_methods import OWN

MIB = 2**20
#: 16 layers of a MiB; a step of 100 ms.
PROFILE = Profile(
    forward=0.03,
    backward=0.06,
    update=0.01,
    tensors=[LayerTimes(0.06 * (i + 1) / 16, 0.03 * (15 - i) / 16, MIB) for i in range(16)],
)
WORK = Work(PROFILE)


def cluster(bandwidth: float, world_size: int = 4, **errors: float) -> Cluster:
    link, backend = LinkCost(1e-4, 1 / bandwidth, **errors), BackendCost(1e-4, 1 / bandwidth, **errors, ring_up_to=16)
    int8 = LinkCost(1e-4, 0.25 / bandwidth + 1e-10)
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


@pytest.mark.parametrize(
    ("mib", "sizes"),
    [(0.01, [25]), (0.1, [2**-6, 2**-5, 2**-4, 25]), (16, [0.5, 1, 2, 4, 8, 25]), (100, [4, 8, 16, 25, 32, 64, 128])],
)
def test_bucket_sizes_give_from_many_buckets_to_one(mib: float, sizes: list[float]) -> None:
    profile = replace(PROFILE, tensors=[LayerTimes(0.0, 0.0, round(mib * MIB / 16))] * 16)
    assert Work(profile).bucket_sizes() == sizes


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


def test_low_rank_is_planned_with_what_its_factors_cost() -> None:
    """16 matrices of 512 x 512, of which factors have a 128th of the values on average; and 8 ms of products."""
    tensors = [replace(one, shape=(512, 512)) for one in PROFILE.tensors]
    work = Work(replace(PROFILE, tensors=tensors), measured={"dear": MethodWork(low_rank_seconds=0.008)})
    at = cluster(1e7)
    found = {one.title: one for one in predict(work, at)}
    low_rank, exact = found["dear (low_rank=4)"], found["dear"]
    assert exact.exact
    assert not low_rank.exact
    assert low_rank.settings == {"fusion": "buffer", "bucket_mb": 0.5, "topology": "torus2d", "low_rank": 4}
    DeARConfig(**low_rank.settings)
    of_the_last = 2 * half_seconds(at, "torus2d", MIB / 128)
    assert low_rank.seconds == pytest.approx(0.108 + of_the_last)
    slow = {one.title: one for one in predict(work, cluster(1e5))}["dear (low_rank=4)"]
    assert slow.seconds == pytest.approx(16 * MIB / 128 * 1.5 / 1e5, rel=0.1)
    for seconds in (0.001, 0.002, 0.004):  # sizes of buckets train alike: none gives time away
        quick = replace(work, measured={"dear": MethodWork(low_rank_seconds=seconds)})
        one = {one.title: one for one in predict(quick, at)}["dear (low_rank=4)"]
        assert one.seconds == pytest.approx(low_rank.seconds - 0.008 + seconds)
    assert fastest(work, at)["dear"] > 2.0
    assert "dear (low_rank=4)" not in {one.title for one in predict(WORK, at)}


def test_dear_is_planned_with_a_codec_in_both_halves() -> None:
    """Which is no variant of the exact training, and keeps the network busy for as long as its all-reduces take."""
    for bandwidth in (1e6, 1e7):
        at = cluster(bandwidth)
        at = replace(at, all_reduces={**at.all_reduces, "int4": LinkCost(1e-4, 0.13 / bandwidth + 1e-10)})
        found = by_method(predict(WORK, at))
        exact, planned = found["dear"], found["dear (compression=int4)"]
        assert exact.exact
        assert not planned.exact
        assert DeARConfig(**planned.settings).compression == "int4"
        on_network = at.all_reduces["int4"].all_reduce(16 * MIB, 4)
        assert on_network < planned.seconds < on_network + 0.1
        assert planned.seconds < 0.3 * exact.seconds
    assert "dear (compression=int4)" not in by_method(predict(WORK, cluster(1e7)))


def test_a_step_with_large_factors_and_one_with_small_ones_take_turns() -> None:
    """Of 16 matrices of 128 rows and 2048 columns, at 3 MB/s: P is 16 times as small as Q."""
    tensors = [replace(one, shape=(128, 2048)) for one in PROFILE.tensors]
    work = Work(replace(PROFILE, tensors=tensors), measured={"dear": MethodWork(low_rank_seconds=1e-6)})
    at = cluster(3e6, 2)
    found = {one.title: one for one in predict(work, at)}["dear (low_rank=4)"]
    small, large = (0.1 + at.halves.all_reduce(32 * 1024, 2) / 16, 0.04 + at.halves.all_reduce(512 * 1024, 2))
    assert found.seconds == pytest.approx((small + large) / 2, rel=0.05)
    trial = lab_of("dear").trial({**found.settings})
    assert trial.period == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 48), (16, 4, 4, 4), (8, 8), (128,)])
def test_bytes_of_factors_are_those_that_are_sent(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor, generator = torch.zeros(shape, dtype=dtype), torch.Generator().manual_seed(0)
    parameters, settings = [NamedParameter("weight", tensor, "", (0, 0))], DeARConfig(low_rank=4)
    bucket = LowRankBucket(LowRankGradients(parameters, settings), [tensor], num_shards=1)
    for side in (P, Q, P):
        gradient = torch.randn(shape, generator=generator).to(dtype)
        sent = bucket.start(0, [gradient], [True]).nbytes
        bucket.finish(0, [gradient])
        assert bytes_sent(LayerTimes(0.0, 0.0, tensor.nbytes, shape), 4, side) == sent


def test_products_of_factors_are_measured_on_gradients_that_stay() -> None:
    gradients = [torch.randn(64, 64, requires_grad=True), torch.randn(64), torch.randn(16, 4, 3, 3).double()]
    before = [one.detach().clone() for one in gradients]
    assert measure_products(gradients, 4) > 0
    assert all(map(torch.equal, gradients, before))
    assert measure_products(gradients, 64) == 0


def measured_layers() -> list[Any]:
    module = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 2)))
    batch = (torch.randn(16, 4), torch.randn(16, 2))
    model = BenchModel("own", module, [], lambda rank: batch, lambda module, b: (module(b[0]) - b[1]).square().mean())
    models = (model, replace(model, module=nn.Linear(4, 2)))
    return [measure_work(one) for one in models]


def test_what_methods_measure_of_the_model() -> None:
    """Pipelines the layers of a Sequential, Pipe-SGD its prediction of weights."""
    ((work, of_linear),) = on_ranks(measured_layers, 1)
    layers = work.measured["ea_pipe"].layers
    assert [(one.parameter_bytes, one.output_bytes) for one in layers] == [(160, 512), (0, 512), (72, 128)]
    assert all(one.seconds > 0 for one in layers)
    assert set(of_linear.measured) == {"pipe_sgd"}
    assert work.measured["pipe_sgd"].seconds > 0


def test_a_fast_network_leaves_nothing_to_gain() -> None:
    found = by_method(predict(WORK, cluster(1e11)))
    for one in found.values():
        assert one.seconds == pytest.approx(0.1, rel=0.06), one.name
    verdict = verdict_of(list(found.values()), {}, WORK.seconds)
    assert verdict.exact is found["ddp"]
    assert verdict.other is None


def test_errors_of_the_costs_are_carried_along() -> None:
    certain, uncertain = (by_method(predict(WORK, one)) for one in (cluster(1e8), cluster(1e8, beta_error=1e-9)))
    assert certain["ddp"].error == 0
    assert uncertain["ddp"].error == pytest.approx(0.1 * 0.252, rel=0.1)
    assert uncertain["ddp"].seconds == certain["ddp"].seconds


def test_other_links_and_hosts() -> None:
    at = cluster(1e8)
    faster = at.with_bandwidth(1e9)
    assert faster.backend.beta == pytest.approx(1e-9)
    assert faster.all_reduces["int8"].beta == pytest.approx(0.25e-9 * 1.0 + 1e-10, rel=0.05)  # encoding takes as long
    larger = by_method(predict(WORK, replace(at, world_size=64)))
    assert larger["ddp"].seconds > by_method(predict(WORK, at))["ddp"].seconds


def test_from_where_on_ddp_is_enough() -> None:
    at = cluster(1e8)
    enough = enough_bandwidth(WORK, at)
    assert enough is not None
    assert by_method(predict(WORK, at.with_bandwidth(1.01 * enough)))["ddp"].seconds <= 0.1 / 0.95
    assert by_method(predict(WORK, at.with_bandwidth(0.9 * enough)))["ddp"].seconds > 0.1 / 0.95
    slow = replace(at, backend=LinkCost(1.0, 1e-8))
    assert enough_bandwidth(WORK, slow) is None, "latency remains"
    batches = enough_accumulation(WORK, at)
    assert batches == 64  # 190 ms bare in 64 * 90
    assert enough_accumulation(WORK, cluster(1e11)) == 1
    assert enough_accumulation(WORK, cluster(4e7)) is None, "a batch that is 128 times as large is no way out"


def test_a_wait_after_the_last_gradient_is_no_computation() -> None:
    """As in DDP, whose backward pass ends when the others' gradients have come."""
    module = nn.Linear(2, 2)
    recorder = StepRecorder(module, torch.device("cpu"))
    for _ in range(3):
        recorder.begin_forward()
        loss = module(torch.ones(2)).sum()
        recorder.begin_backward()
        loss.backward()
        time.sleep(1.0)
        recorder.begin_update()
        assert recorder.end()
    profile = recorder.profile()
    assert profile.backward == max(tensor.ready for tensor in profile.tensors) < 0.5
    assert recorder.num_steps == 3
    recorder.begin_forward()
    assert not recorder.end()  # a batch that is accumulated


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
    assert main(["plan", "--model", f"tests.nightly.lab.test_plan:{model}", "--output", str(tmp_path / "plan")]) == 2
    (line,) = (one for one in capsys.readouterr().err.splitlines() if one.startswith("pipesync: error: "))
    assert "cannot be measured, so that there is no plan." in line
    assert said in line
    assert not (tmp_path / "plan").exists()


@pytest.mark.parametrize("words", [["plan"], ["bench", "step"]])
def test_a_folder_that_cannot_be_written_to_is_told_before_anything_is_measured(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main([*words, "--output", str(tmp_path / "file" / "plan")]) == 2
    assert (
        f"output={str(tmp_path / 'file' / 'plan')!r} cannot be written to: Not a directory." in capsys.readouterr().err
    )


def test_tasks_of_srun_do_not_plan_each_for_itself(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "64")
    assert main(["plan"]) == 2
    assert "srun has started 64 tasks of this command" in (said := capsys.readouterr().err)
    assert "srun --ntasks-per-node=1 torchrun" in said


@pytest.mark.parametrize("words", [["plan"], ["bench", "step"]])
def test_a_launchers_ranks_have_no_emulated_links(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(user_namespace, "enter_user_namespace", lambda: pytest.fail("it has no way to the others"))
    monkeypatch.setattr("sys.argv", ["pipesync", *words, "--rate", "1gbit"])
    assert main() == 2
    assert "1gbit: these links are of an emulated network, and a launcher has started this rank" in (
        " ".join(capsys.readouterr().err.split())
    )


def test_plans_under_torchrun_and_reads_the_plan_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the user's own model, with what was run, which rank 0 alone tells; what is read again is the same plan."""
    torchrun = ["torchrun", "--standalone", "--nproc-per-node", 2, "-m", "lightning_pipesync", "plan"]
    words = ["--model", "tests.nightly.lab.test_plan:small_model", "--steps", 2, "--rounds", 1, "--output", tmp_path]
    [ended] = run_together(([*torchrun, *words], environment()))
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.count(f"In {tmp_path}: plan.json, plan.md, plan.png.") == 1, ended.stdout
    written = (tmp_path / "plan.md").read_text()
    for name in METHODS.keys() - OWN:
        monkeypatch.delitem(METHODS, name)  # other tests have registered it in this process
    assert written == as_markdown(*read_plan(tmp_path / "plan.json"))
    (result,) = json.loads((tmp_path / "plan.json").read_text())["results"]
    work, at, _ = of_result(result)
    assert sum(tensor.num_bytes for tensor in work.profile.tensors) == 4 * (64 * 64 + 64 + 64 + 1)
    assert at.world_size == 2
    run = {name.partition(":")[0] for name, measured in result["measured"].items() if "seconds" in measured}
    assert {"ddp", "dear"} < run, result["measured"]
    assert main(["plan", "--from", str(tmp_path / "plan.json"), "--hosts", "64", "--rate", "25gbit"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "(extrapolated; nothing was run)" in said[:120]
    assert "on 64 hosts with 25 Gbit/s each" in said
    assert "Extrapolated from 2 hosts" in said
    assert "DDP's all-reduce is a " in said
    words = ["--from", str(tmp_path / "plan.json"), "--ddp_all_reduce", "ring"]
    assert main(["plan", *words, "--hosts", "4096"]) == 0
    assert "DDP's all-reduce is a ring, as asked for." in " ".join(capsys.readouterr().out.split())
    for measured in (words, [*words, "--hosts", "2"], words[2:]):
        assert main(["plan", *measured]) == 2
        assert "ddp_all_reduce='ring' is for another number of hosts than was measured" in capsys.readouterr().err
