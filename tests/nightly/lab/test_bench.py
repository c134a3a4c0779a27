"""``pipesync bench``: timelines in the order of the methods, and what a launcher has started."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from io import StringIO
from itertools import groupby
from pathlib import Path

import pytest

from lightning_pipesync.cli import main
from tests.support.bench_runs import assert_pictures, result_of
from tests.support.harness import on_ranks


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
