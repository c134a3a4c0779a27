"""Each benchmark runs once, with as little as it takes: it succeeds, and its report and its pictures are there."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

import pytest

from tests.support.bench_runs import PLACES, assert_pictures, result_of, run_command

#: By command, in benchmarks/ or of ``pipesync``: its options, words of its report, and the pictures that it draws.
RUNS: dict[str, tuple[str, str, str]] = {
    "bench collectives": (
        "--hosts 4 --sizes_mib 0.01 0.1 --codecs int8 --rounds 1 --topologies torus2d tree",
        "ours on a tree: all_reduce, int8",
        "collectives",
    ),
    "memory": (
        "--model transformer --batch_size 1 --methods dear --steps 1 --hosts 4",
        "HSDP",
        "",
    ),
    "sharded": (
        "--model emulated-alexnet --scale 0.001 --ratio 1 --methods dear --steps 1 --rounds 1 --hosts 4",
        "HSDP",
        "",
    ),
    "codecs": ("--mib 0.1 --rounds 1", "int8", ""),
    "collectives": ("--sizes_mib 0.01 0.1 --rounds 1", "ours: push + pull, central server", "collectives"),
    "converge": (
        "--compute 1ms --slow 1:50% --stalls 10%:1 --steps 4 --evaluations 2 --methods ddp selsync:delta=1 "
        "parameter_server:policy=sync parameter_server:policy=async",
        "digits on 2 hosts, 1ms a step, host 1 at 50%, stalls 10%:1",
        "converge errors_2 staleness_2",
    ),
    "overhead": ("--steps 2 --batch_size 1 --sequence 8", "share of a plain step", ""),
    "pipeline": (
        "--methods sgd weight_stashing ea_pipe:elastic_force=0.3 --model cnn --stages 3 --learning_rates 0.1 1e30 "
        "--seeds 0 --batch_sizes 200 --epochs 1 --evaluations 1",
        "diverged |",
        "pipeline pipeline_by_rate",
    ),
    "plan_accuracy": (
        "--model emulated-alexnet --compute_ms 20 --ratio 0.002 --steps 1 --rounds 1",
        "off by",
        "plan_accuracy",
    ),
    "quality": (
        "--tasks mnist1d --optimizers sgd --workers 2 3 --methods ddp selsync pipe_sgd:compression=int8 --seeds 0 1 "
        "--steps 30 --evaluations 2 --rate 0.05 --processes 1",
        "| pipe_sgd: compression=int8 |",
        "quality",
    ),
    "scale": (
        "--networks resnet50 --hosts 8 16 --gbits 1 10 --cards 1 2",
        "| dear, one rank a host | 4 |",
        "scale",
    ),
    "stages": (
        "--methods ea_pipe ea_pipe:replicas=4 gpipe --stage_ms 3 --activation_mib 0.01 --steps 2 --rounds 1",
        "| ea_pipe: replicas=4 |",
        "stages",
    ),
    "staleness": (
        "--policies sync async async:staleness_lr=distance --histograms async n_softsync:n=2 --learners 4 "
        "--gradients 50 --passes 2 --evaluations 1 --batch_size 4 --hidden 4 --seeds 0 1 --target 95 --n_push 1 2 "
        "--learning_rates 0.1 1e30",
        "(2 diverged)",
        "staleness_counts staleness_errors staleness_downpour",
    ),
    "step": (
        "--scale 0.02 --ratio 1 --steps 1 --rounds 1 --bucket_mb 1 --methods ddp fsdp2_resharded dear:fusion=random "
        "mg-wfbp pipe_sgd:compression=int8",
        "sizes tried in",
        "speedup scaling breakdown",
    ),
    "timeline": ("--scale 0.01 --bucket_mb 0.1 --methods ddp byte-scheduler", "ByteScheduler", "timeline"),
}
#: Those that a launcher starts; and goodput, whose replicas die and come by the clock.
ELSEWHERE = {"replicas", "goodput"}


def test_each_benchmark_is_run() -> None:
    assert {*PLACES} - ELSEWHERE == {name for name in RUNS if not name.startswith("bench ")}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.usefixtures("forked_ranks")
def test_a_benchmark_runs(name: str, tmp_path: Path) -> None:
    options, words, pictures = RUNS[name]
    assert run_command(name, f"{options} --output {tmp_path}") == 0
    reports = "".join(path.read_text() for path in tmp_path.glob("*.md"))
    assert words in reports
    assert list(tmp_path.glob("*.json"))
    assert_pictures(tmp_path, *pictures.split())


@pytest.mark.usefixtures("forked_ranks")
def test_timelines(tmp_path: Path) -> None:
    """DDP communicates in backward only; DeAR's second half starts after it, under the next forward pass."""
    options = f"--scale 0.01 --bucket_mb 0.1 --methods ddp dear pipe_sgd --trace {tmp_path / 'trace.json'}"
    result = result_of("timeline", options, tmp_path)
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
