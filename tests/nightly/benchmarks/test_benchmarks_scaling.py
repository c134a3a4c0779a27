"""What `python -m benchmarks.scaling` measures on two workers, and how it is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.scaling import ALONE, Scaling, limit_of_throughput, throughput
from tests.nightly.benchmarks.bench_runs import assert_pictures, run_command
from tests.support.harness import on_ranks

SERVER, DDP = "parameter server", "DDP, 0.5 MiB"


def measure() -> dict[str, Any]:
    return Scaling(scale=0.002, ratio=(0.5, 2.0), steps=1, rounds=1).measure(lambda text: None)


def test_table_and_picture_of_a_real_run(tmp_path: Path) -> None:
    result = on_ranks(measure, 2)[0]
    for run in result["runs"]:
        assert set(run["seconds"]) == set(run["limit"]) == {ALONE, SERVER, DDP}
        # Two workers: the server's link carries the gradients of one, and then the weights.
        exchange = 2 * run["num_bytes"] / result["bandwidth"]
        assert run["limit"][SERVER] - run["limit"][ALONE] == pytest.approx(exchange)
        assert run["limit"][DDP] < run["limit"][SERVER]
    scaling = Scaling(output=tmp_path)
    results = [result, result | {"world_size": 4}]
    text = scaling.report(results)
    assert text.count("\n| 0.5 | 2 |") == text.count("\n| 2 | 4 |") == 1
    scaling.draw(results)
    assert_pictures(tmp_path, "scaling")


def test_throughput_by_hand() -> None:
    """A step of 1 s alone that takes 4 s on 8 workers: twice the samples per second."""
    run = {"seconds": {ALONE: [1.0, 9.0, 1.0], SERVER: [4.0]}, "limit": {SERVER: 2.0}}
    assert throughput({"world_size": 8}, run, SERVER) == 2
    assert limit_of_throughput({"world_size": 8}, run, SERVER) == 4


@pytest.mark.parametrize("option", ["--model cnn", "--ratio 0", "--rounds 0", "--methods cubic"])
def test_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("scaling", option) != 0
    assert option.split()[0][2:] in capsys.readouterr().err
