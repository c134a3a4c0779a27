"""What `python -m benchmarks.side_by_side` measures, and how it is shown."""

from __future__ import annotations

from typing import Any

from benchmarks.side_by_side import SideBySide
from tests.harness import launch

METHODS = ("1f1b:num_pipelines=2", "ea_pipe:num_pipelines=2,average=elastic")


def measure() -> dict[str, Any]:
    return SideBySide(methods=METHODS, learning_rates=(0.03,), epochs=6, seeds=(0,)).measure(lambda text: None)


def test_pipelines_learn_and_have_a_row_each() -> None:
    result = launch(measure, 4)[0]
    assert [run["method"] for run in result["runs"]] == [*METHODS]
    assert result["runs"][0]["error"] < 60  # 90 without learning
    text = SideBySide(methods=METHODS, learning_rates=(0.03,), epochs=6, seeds=(0,)).report([result])
    assert "### digits on 4 ranks" in text
    assert "| ea_pipe: num_pipelines=2, average=elastic |" in text
