"""``pipesync bench``: collectives with their limits, timelines in the order of the methods, and under a launcher."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from io import StringIO
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from benchmarks.collectives import Collectives
from lightning_pipesync.cli import main
from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.lab.bench.bandwidth import measure_bandwidth
from lightning_pipesync.lab.bench.collectives import tables_of
from tests.support.bench_runs import assert_pictures, result_of
from tests.support.harness import on_ranks


def collectives() -> tuple[float, dict[str, Any]]:
    progress: list[str] = []
    result = Collectives(sizes_mib=(0.01, 0.1, 1.0), codecs=("bf16",), rounds=2).measure(progress.append)
    assert progress == ["0.01 MiB", "0.1 MiB", "1 MiB"]
    return measure_bandwidth(MIB, rounds=1), result


def test_collectives() -> None:
    for bandwidth, result in on_ranks(collectives, 2):
        assert bandwidth > 0
        assert len(result["rows"]) == 3 * 10
        limits = {row["operation"]: row["limit"] for row in result["rows"]}
        assert limits["all_reduce"] == pytest.approx(2 * limits["all_gather"])
        assert limits["all_gather"] == pytest.approx(MIB / 2 / result["bandwidth"], rel=0.01)
        assert limits["push + pull, central server"] == pytest.approx(2 * limits["all_reduce"])
        assert limits["push + pull, servers on all ranks"] == limits["all_reduce"]
        assert all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 for row in result["rows"])
        fits = {(fit["implementation"], fit["operation"]) for fit in result["fits"]}
        assert fits >= {("ours", "all_reduce"), ("gloo", "all_reduce")}
        assert not any("push" in operation for _, operation in fits)
        text = tables_of(result)
        assert text.count("ours: push + pull, central server") == 3, "time, processor time and prediction"
        assert text.count("gloo: all_gather") == 3, "time, processor time and fit"


@pytest.mark.usefixtures("forked_ranks")
def test_collectives_on_a_torus_and_a_tree(tmp_path: Path) -> None:
    options = "--hosts 4 --sizes_mib 0.01 0.1 --codecs int8 --rounds 1 --topologies torus2d tree"
    result = result_of("bench collectives", options, tmp_path)
    assert result["world_size"] == 4
    assert {fit["implementation"] for fit in result["fits"]} == {"ours", "gloo"}, "others have other messages"
    assert result["environment"]["versions"]["torch"]
    for name in ("ours", "ours on a torus2d", "ours on a tree"):
        assert f"{name}: all_reduce, int8" in (tmp_path / "collectives.md").read_text()


@pytest.mark.usefixtures("forked_ranks")
def test_timelines(tmp_path: Path) -> None:
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
