"""The benchmarks' own arithmetic, and that they run."""

from __future__ import annotations

import json
import sys
import time
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.collectives import Collectives
from benchmarks.learners.push_pull import PushPull
from lightning_pipesync.cli import main
from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.cost import LinkCost
from lightning_pipesync.core.layer_limits import LayerTimes
from lightning_pipesync.core.work import Profile
from lightning_pipesync.lab.bench import job, step_report, timeline
from lightning_pipesync.lab.bench.bandwidth import measure_bandwidth
from lightning_pipesync.lab.bench.collectives import tables_of
from lightning_pipesync.lab.bench.round_robin import Timed, median_and_quartiles, time_round_robin
from lightning_pipesync.lab.bench.step import Step, predict_ddp
from lightning_pipesync.lab.bench.tables import show, table
from tests.nightly.benchmarks.bench_runs import assert_pictures, result_of
from tests.support.case_table import launch_cases
from tests.support.harness import on_ranks

ERRORS = ("alpha_error", "beta_error")


def turns() -> tuple[list[str], dict[str, Timed]]:
    calls: list[str] = []
    rank = dist.get_rank()
    operations = {
        "slow on rank 1": lambda: (calls.append("a"), time.sleep(0.05 * rank)),
        "quick": lambda: (calls.append("b"), sum(range(10**6))),
    }
    timed = time_round_robin(operations, 2, before=lambda name: calls.append(f"before {name[0]}"))
    return calls, timed


def test_operations_take_turns_and_the_slowest_rank_counts() -> None:
    for calls, timed in on_ranks(turns, 2):
        assert calls == ["before s", "a", "before q", "b"] * 3, "one round is not counted"
        assert len(timed["quick"].seconds) == len(timed["quick"].processor_seconds) == 2
        assert min(timed["slow on rank 1"].seconds) >= 0.05
        assert min(timed["quick"].processor_seconds) > max(timed["slow on rank 1"].processor_seconds), "it sleeps"


def test_quartiles() -> None:
    assert median_and_quartiles([3.0, 1.0, 2.0, 4.0, 5.0]) == (3.0, 2.0, 4.0)
    assert median_and_quartiles([7.0]) == (7.0, 7.0, 7.0)


def collectives() -> tuple[float, dict[str, Any]]:
    progress: list[str] = []
    result = Collectives(sizes_mib=(0.01, 0.1, 1.0), codecs=("bf16",), rounds=2).measure(progress.append)
    assert progress == ["0.01 MiB", "0.1 MiB", "1 MiB"]
    return measure_bandwidth(MIB, rounds=1), result


def test_collectives() -> None:
    for bandwidth, result in on_ranks(collectives, 2):
        assert bandwidth > 0
        assert len(result["rows"]) == 3 * 10
        [limit] = {row["limit"] for row in result["rows"][-10:] if row["operation"] == "all_gather"}
        whole = {row["operation"] for row in result["rows"] if row["limit"] > 1.5 * limit}
        assert whole >= {"all_reduce", "reduce_scatter + all_gather"} or len(whole) == 0
        limits = {row["operation"]: row["limit"] for row in result["rows"]}
        assert limits["all_reduce"] == pytest.approx(2 * limits["all_gather"])
        assert limits["all_gather"] == pytest.approx(MIB / 2 / result["bandwidth"], rel=0.01)
        assert limits["push + pull, central server"] == pytest.approx(2 * limits["all_reduce"])
        assert limits["push + pull, servers on all ranks"] == limits["all_reduce"]
        assert all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 for row in result["rows"])
        assert {(fit["implementation"], fit["operation"]) for fit in result["fits"]} >= {
            ("ours", "all_reduce"),
            ("gloo", "all_reduce"),
        }
        assert not any("push" in fit["operation"] for fit in result["fits"])
        text = tables_of(result)
        assert "ours: reduce_scatter + all_gather" in text
        assert "ours: all_reduce, bf16" in text
        assert text.count("ours: push + pull, central server") == 3, "time, processor time and prediction"
        assert text.count("gloo: all_gather") == 3, "time, processor time and fit"


def test_what_the_all_reduce_predicts() -> None:
    """1 ms a message and 1 s a MiB, on 4 ranks; a second measured where 1.5 s are predicted is an error of +50%."""
    names = ["all_gather", "all_reduce", "push + pull, central server", "push + pull, servers on half of the ranks"]
    shared = {"codec": "none", "num_bytes": MIB, "seconds": [1.0], "processor_seconds": [1.0], "limit": 0.5}
    rows = [{**shared, "implementation": "ours", "operation": name} for name in names]
    others = [{**rows[1], "implementation": "gloo"}, {**rows[1], "codec": "int8"}]
    fits = [
        {"implementation": name, "operation": "all_reduce", "alpha": alpha, "beta": 1 / MIB, **dict.fromkeys(ERRORS, 0)}
        for name, alpha in (("gloo", 1.0), ("ours", 1e-3))
    ]
    Collectives().add_predictions([*rows, *others], fits, 4)
    assert [row["predicted"] for row in rows] == pytest.approx([0.753, 1.506, 6.002, 3.002])
    assert [row["predicted"] for row in others] == [None, None]
    result = {"world_size": 4, "bandwidth": 1e6, "rows": [*rows, *others], "fits": fits}
    text = tables_of(result)
    assert "| ours: all_reduce | 1506.0 (+51%) |" in text
    assert "| ours: push + pull, central server | 6002.0 (+500%) |" in text
    Collectives().add_predictions(rows, [], 4)
    assert "Predicted" not in tables_of({**result, "rows": [{**rows[0]}], "fits": []})


def numbers_sent(servers: int) -> int:
    transport = Transport()
    flat = torch.arange(6.0) * 10 ** dist.get_rank()
    exchange = PushPull(transport, flat.numel(), servers)
    exchange.push(flat)
    exchange.pull(flat)
    transport.close()
    assert flat.tolist() == [111.0 * i for i in range(6)]
    return transport.traffic.bytes_sent["send"] // 4


def test_a_push_and_a_pull_through_servers() -> None:
    """Three ranks get the sum; a server sends its shard to both others, and pushes what it does not serve itself."""
    sent = launch_cases({servers: partial(numbers_sent, servers) for servers in (1, 2, 3)}, 3)
    assert [sent[servers] for servers in (1, 2, 3)] == [[12, 6, 6], [9, 9, 6], [8, 8, 8]]


def test_ddp_is_predicted_bucket_by_bucket() -> None:
    """Two buckets of 2 MiB: the first is ready after 2 of 3 gradients, the second with the last one."""
    tensors = [LayerTimes(1.0, 0.5, MIB), LayerTimes(2.0, 0.2, MIB), LayerTimes(3.0, 0.0, 2 * MIB)]
    profile = Profile(forward=1.0, backward=3.0, update=0.5, tensors=tensors)
    link = LinkCost(alpha=0.25, beta=1.0 / MIB)  # an all-reduce of n MiB on 2 ranks takes 0.5 + n seconds
    assert predict_ddp(profile, link, 2, bucket_mb=2.0) == pytest.approx(1.0 + (2.0 + 2.5 + 2.5) + 0.5)
    assert predict_ddp(profile, link, 2, bucket_mb=100.0) == pytest.approx(1.0 + (3.0 + 4.5) + 0.5)
    assert predict_ddp(profile, LinkCost(0.0, 0.0), 2, bucket_mb=2.0) == pytest.approx(4.5)


def step_result() -> dict[str, Any]:
    cost = {"forward": 0.1, "backward": 0.2, "update": 0.0, "reduce_scatter": 0.15, "all_gather": 0.15}
    names = {"no communication": 0.304, "DDP, 1 MiB": 0.5, "DDP, 25 MiB": 0.4, "quick": 0.32}
    shared = {"processor_seconds": [0.04, 0.05, 0.06], "limit": 0.3, "layer_limit": 0.348, "search": None}
    candidates = [
        {"name": name, "seconds": [seconds] * 3, "predicted": 0.44 if "25" in name else None, **shared}
        for name, seconds in names.items()
    ]
    settings = {"model": "emulated-resnet50"}
    run = {"num_bytes": MIB, "cost": cost, "candidates": candidates}
    return {"settings": settings, "world_size": 2, "bandwidth": 1e8, "runs": [run]}


def test_rows_of_the_step_table() -> None:
    rows = {row.name: row for row in step_report.rows_of(step_result()["runs"][0])}
    assert rows["quick"].over_ddp == pytest.approx(0.4 / 0.32), "DDP with its best bucket size"
    assert rows["quick"].of_limit == pytest.approx(0.3 / 0.32)
    assert rows["DDP, 1 MiB"].exposed == pytest.approx(0.2)
    assert rows["DDP, 25 MiB"].prediction_error == pytest.approx(0.1)
    assert rows["quick"].prediction_error is None
    assert rows["quick"].scaling_efficiency == pytest.approx(0.95)
    assert rows["no communication"].scaling_efficiency == 1.0
    text = step_report.as_markdown([step_result()])
    assert "| DDP, 25 MiB | 400 | 400-400 | 1.00 | 75% | 87% | 76% | 50 | +10% |" in text
    assert "communication overhead = T(n) - T(1)" in text
    assert "(Eq. 8), 350 with the paper's DeAR (Eq. 7), 300 with gathers under\nbackward, too" in text
    assert "at least 400 ms with the" in text
    assert "300 with Pipe-SGD, which\nmay need twice as many" in text
    assert "600 ms.\n" in text


def test_the_step_table_fits_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """No name and no number is cut."""
    monkeypatch.setenv("COLUMNS", "80")
    result = step_result()
    name = "selsync (overlap=forward, compression=int8), synchronized step, 25 MiB"
    seconds = {"seconds": [1.1, 1.234, 1.345], "processor_seconds": [1.234]}
    result["runs"][0]["candidates"].append({**result["runs"][0]["candidates"][-1], "name": name, **seconds})
    show(step_report.as_markdown([result]))
    shown = capsys.readouterr().out
    assert "\u2026" not in shown
    words = shown.split()
    assert all(
        word in words
        for word in ["communication", *name.split(), "1234", "1167-1289", *" ".join(step_report.COLUMNS).split()]
    )


def test_a_table_that_does_not_fit_has_long_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    cells = [f"method_{number}" for number in range(9)]
    show("Text.\n\n" + table(["", *cells[1:]], [cells]) + "\nThe end of a text that is longer than 40 characters.\n")
    shown = capsys.readouterr().out
    lines = [line.split() for line in shown.splitlines()]
    assert cells in lines
    assert cells[1:] in lines
    assert "longer than 40 characters" not in shown  # text is as wide as the terminal


@pytest.mark.usefixtures("forked_ranks")
def test_the_command_for_collectives(tmp_path: Path) -> None:
    options = "--hosts 4 --sizes_mib 0.01 0.1 --codecs int8 --rounds 1 --topologies torus2d tree"
    result = result_of("bench collectives", options, tmp_path)
    assert result["world_size"] == 4
    assert {fit["implementation"] for fit in result["fits"]} == {"ours", "gloo"}, "others have other messages"
    assert result["environment"]["versions"]["torch"]
    for name in ("ours", "ours on a torus2d", "ours on a tree"):
        assert f"{name}: all_reduce, int8" in (tmp_path / "collectives.md").read_text()
    assert_pictures(tmp_path, "collectives")


@pytest.mark.parametrize(
    ("model", "options"),
    [("emulated-alexnet", "--scale 0.001 --ratio 0.5 2"), ("cnn", "")],
    ids=["emulated", "real"],
)
@pytest.mark.usefixtures("forked_ranks")
def test_the_command_for_steps(model: str, options: str, tmp_path: Path) -> None:
    """Each candidate is there, DDP is predicted, and there is a picture."""
    settings = f"--hosts 2 --model {model} --steps 1 --rounds 1 --bucket_mb 1 25"
    result = result_of("bench step", f"{settings} {options}", tmp_path)
    assert len(result["runs"]) == (2 if options else 1)
    for run in result["runs"]:
        seconds = {one["name"]: one["seconds"] for one in run["candidates"]}
        ours = ["dear, 1 MiB", "dear, 25 MiB", "selsync, synchronized step", "selsync, local step"]
        assert list(seconds) == ["no communication", "DDP, 1 MiB", "DDP, 25 MiB", "FSDP2", "DDP + ZeRO-1", *ours]
        assert all(len(values) == 1 and values[0] > 0 for values in seconds.values())
        assert {one["name"] for one in run["candidates"] if one["predicted"]} == {"DDP, 1 MiB", "DDP, 25 MiB"}
    assert_pictures(tmp_path, "speedup")


def test_steps_are_timed_on_gpus() -> None:
    assert Step(device="cuda", model="cnn").ratios == ()
    with pytest.raises(ValueError, match="model='emulated-resnet50': its layers sleep on the host"):
        Step(device="cuda")
    with pytest.raises(ValueError, match="device='gpu' must be cpu or cuda"):
        Step(device="gpu")


@pytest.mark.usefixtures("forked_ranks")
def test_a_search_and_levels_of_pipelining(tmp_path: Path) -> None:
    settings = "--hosts 2 --scale 0.02 --ratio 4 --steps 1 --rounds 1 --bucket_mb 1"
    methods = "--methods ddp fsdp2_resharded dear:fusion=random mg-wfbp pipe_sgd:pipeline_level=2"
    methods += " pipe_sgd:compression=int8 selsync:overlap=forward dear:edge_mb=0.1,overlap=forward"
    result = result_of("step", f"{settings} {methods}", tmp_path)
    ddp, fsdp2, dear, merged, level_2, int8, selsync, edged = result["runs"][0]["candidates"][1:]
    assert fsdp2["name"] == "FSDP2, resharded"
    assert (level_2["name"], int8["name"]) == ("pipe_sgd (pipeline_level=2)", "pipe_sgd (compression=int8)")
    assert selsync["name"] == "selsync (overlap=forward), synchronized step, 1 MiB"
    assert edged["name"] == "dear (edge_mb=0.1, overlap=forward), 1 MiB"
    assert int8["limit"] <= level_2["limit"]
    assert int8["predicted"] <= level_2["predicted"]
    assert merged["limit"] == ddp["limit"]
    assert (ddp["name"], ddp["search"], dear["name"]) == ("DDP, 1 MiB", None, "dear (fusion=random)")
    assert 1 < dear["search"]["trials"] <= 20
    assert "sizes tried in" in (tmp_path / "step.md").read_text()
    assert_pictures(tmp_path, "speedup", "scaling", "breakdown")


def test_time_that_is_hidden() -> None:
    """Forward for 3 s, then communication for 4 s, half of it under 2 s of backward."""
    spans = [("forward", 0, 2), ("forward", 2, 3), ("all-reduce", 3, 6), ("all-reduce", 5, 7), ("backward", 3, 5)]
    spans_as_saved = [{"kind": kind, "number": 0, "start": start, "end": end} for kind, start, end in spans]
    text = timeline.as_markdown({"timelines": [{"name": "one", "spans": spans_as_saved, "steps": [7.0]}]})
    assert "| one | 7000 | 5000 | 4000 | 50% |" in text


@pytest.mark.usefixtures("forked_ranks")
def test_the_command_for_timelines(tmp_path: Path) -> None:
    """DDP communicates in backward only; DeAR's second half starts after it, under the next forward pass."""
    options = f"--scale 0.01 --bucket_mb 0.1 --methods ddp dear pipe_sgd --trace {tmp_path / 'trace.json'}"
    result = result_of("bench timeline", options, tmp_path)
    ddp, dear, pipe_sgd = result["timelines"]
    for one in (ddp, pipe_sgd):
        assert {span["kind"] for span in one["spans"]} == {"forward", "backward", "all-reduce"}
    assert {span["kind"] for span in dear["spans"]} == {"forward", "backward", "reduce-scatter", "all-gather"}
    assert len(ddp["steps"]) == len(dear["steps"]) == 2
    operations = sorted((span["start"], span["kind"]) for span in dear["spans"] if "-" in span["kind"])
    in_turns = [kind for kind, _ in groupby(kind for _, kind in operations)]
    first = in_turns.index("reduce-scatter")  # before it may be what the step before has left in flight
    assert in_turns[first : first + 3] == ["reduce-scatter", "all-gather", "reduce-scatter"]
    assert_pictures(tmp_path, "timeline")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    ranks = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert len(ranks) == 6
    layers = {ranks[event["pid"]] for event in events if event["name"] == "pipesync::forward of a layer"}
    assert layers == set(ranks.values())
    halves = {ranks[event["pid"]] for event in events if "pipesync::reduce_scatter" in event["name"]}
    assert halves == {name for name in ranks.values() if name.startswith("dear")}


def test_the_port_of_the_ranks_is_taken_before_they_start() -> None:
    """Otherwise a rank that is early may connect to itself there, and rank 0 could not open its store."""
    lines: list[str] = []
    script = "import os, socket; socket.create_server(('127.0.0.1', int(os.environ['MASTER_PORT'])))"
    assert job._run_here([sys.executable, "-S", "-c", script], 1, lambda _, line: lines.append(line)) == 1
    assert "Address already in use" in lines[-1]


def said_by_rank(words: list[str]) -> str:
    with redirect_stdout(StringIO()) as said:
        assert main(words) == 0
    return said.getvalue()


def test_under_a_launcher(tmp_path: Path) -> None:
    """The ranks in its environment are what is measured; only the first one shows and writes anything."""
    options = ["bench", "collectives", "--sizes_mib", "0.01", "0.1", "--rounds", "1", "--output", str(tmp_path)]
    first, second = on_ranks(said_by_rank, 2, options, init=False)
    assert "Results and pictures" in first
    assert second == ""
    assert json.loads((tmp_path / "collectives.json").read_text())["results"][0]["world_size"] == 2
