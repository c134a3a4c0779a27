"""What `python -m benchmarks.batch_cost` measures, and how it is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_pipesync.core.buckets import MIB
from tests.bench_runs import assert_pictures, result_of, run_command


def test_more_samples_take_more_memory(tmp_path: Path) -> None:
    options = "--models cnn --batch_size 32 --workers 1 4 --rounds 1"
    result = result_of("batch_cost", options, tmp_path)
    [measured] = result["models"]
    assert measured["model"] == "cnn"
    small, large = measured["peak"]
    # Of the first convolution and its norm alone, a mini-batch keeps two tensors of 32 x 32 x 32 values a sample.
    assert large - small > 2 * 3 * 32 * 4 * 32**3
    assert small > measured["bytes"] > 0.3 * MIB
    assert len(measured["seconds"]) == 2
    text = (tmp_path / "batch_cost.md").read_text()
    assert "| cnn (0 MiB) | 4 | 128 |" in text
    assert_pictures(tmp_path, "batch_cost")


@pytest.mark.parametrize("option", ["--models emulated-resnet50", "--workers 0", "--batch_size 0"])
def test_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("batch_cost", option) != 0
    assert option.split()[0][2:] in capsys.readouterr().err
