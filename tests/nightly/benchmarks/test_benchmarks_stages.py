"""What `python -m benchmarks.stages` measures, and how it is shown."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.stages import Stages, parse_candidate
from tests.nightly.benchmarks.bench_runs import assert_pictures
from tests.support.harness import on_ranks

METHODS = ("ea_pipe", "ea_pipe:replicas=4", "naive", "gpipe")


def measure() -> dict[str, Any]:
    stages = Stages(methods=METHODS, stage_ms=(30.0,), activation_mib=0.01, steps=2, rounds=1)
    return stages.measure(lambda text: None)


@cache
def result() -> dict[str, Any]:
    return on_ranks(measure, 2)[0]


def trace_of(method: str) -> list[list[tuple[str, float, float]]]:
    [run] = result()["runs"]
    [trace] = [candidate["trace"] for candidate in run["candidates"] if candidate["name"] == method]
    return list(trace)


@pytest.mark.parametrize(
    ("method", "order"),
    [
        ("ea_pipe", ["FFBFBFBB", "FBFBFBFB"]),  # Fig. 1b
        ("ea_pipe:replicas=4", ["FFFFBBBB", "FBFBFBFB"]),
        ("naive", ["FFBFBFBB", "FBFBFBFB"]),
        ("gpipe", ["FFBB" * 4, "FFBB" * 4]),  # two micro-batches
    ],
)
def test_stages_work_in_the_order_of_the_method(method: str, order: list[str]) -> None:
    assert ["".join(kind[0].upper() for kind, _, _ in spans) for spans in trace_of(method)] == order


@pytest.mark.parametrize("method", ["ea_pipe", "naive"])
def test_stages_work_at_the_same_time(method: str) -> None:
    pairs = product(*([(begin, end) for _, begin, end in spans] for spans in trace_of(method)))
    assert any(first[0] < second[1] and second[0] < first[1] for first, second in pairs)


def test_table_and_picture(tmp_path: Path) -> None:
    stages = Stages(output=tmp_path)
    text = stages.report([result()])
    assert "### 2 stages of 30 ms" in text
    assert "| ea_pipe: replicas=4 |" in text
    [run] = result()["runs"]
    assert run["stage_seconds"] == pytest.approx(0.03)
    stages.draw([result()])
    assert_pictures(tmp_path, "stages")


def measure_side_by_side() -> dict[str, Any]:
    methods = ("naive", "naive:num_pipelines=2", "1f1b:num_pipelines=2,average=elastic")
    stages = Stages(methods=methods, stage_ms=(3.0,), activation_mib=0.01, steps=2, rounds=1)
    return stages.measure(lambda text: None)


def test_pipelines_side_by_side(tmp_path: Path) -> None:
    """They have a row in the table, and no panel in the picture."""
    result = on_ranks(measure_side_by_side, 4)[0]
    [run] = result["runs"]
    assert [candidate["trace"] is None for candidate in run["candidates"]] == [False, True, True]
    stages = Stages(output=tmp_path)
    assert "| naive: num_pipelines=2 |" in stages.report([result])
    stages.draw([result])
    assert_pictures(tmp_path, "stages")


def test_a_method_has_its_settings() -> None:
    config = parse_candidate("ea_pipe:replicas=5,elastic_force=0.3")
    assert (config.algorithm, config.replicas, config.elastic_force) == ("ea_pipe", 5, 0.3)
