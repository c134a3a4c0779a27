"""What `python -m benchmarks.weight_density` compares, and how it is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.weight_density import WeightDensity
from tests.bench_runs import assert_pictures, run_command
from tests.harness import launch

METHODS = "ddp", "selsync:delta=0,aggregation=gradients,partition=defdp", "selsync:delta=1e9"


def measure() -> dict[str, Any]:
    benchmark = WeightDensity(task="mnist1d", methods=METHODS, seeds=(0, 1), epochs=1)
    return benchmark.measure(lambda text: None)


def test_weights_are_those_of_the_ranks(tmp_path: Path) -> None:
    first, second = launch(measure, 2)
    assert first["runs"] == second["runs"], "means over the ranks"
    runs = {(run["method"], run["seed"]): run["points"] for run in first["runs"]}
    assert len(runs) == 6
    ddp, synchronous, apart = (runs[method, 0] for method in METHODS)
    for point in ddp:
        assert (point["distance"], point["spread"]) == (0.0, 0.0)
    assert all(point["distance"] > 0 for point in runs["ddp", 1]), "from the first seed"
    for exact, local in zip(synchronous, apart, strict=True):
        assert local["spread"] > 0.01
        assert exact["spread"] < 1e-6, "all synchronize, as DDP, on the same data"
        assert exact["distance"] < 1e-6 < 1e-4 < local["distance"]
    for own, other in zip(first["densities"], second["densities"], strict=True):
        assert own["grid"] == other["grid"], "that of DDP, which is the same on all ranks"
        assert own["methods"][0] == other["methods"][0]
        assert own["methods"][2] != other["methods"][2], "of each rank's own weights"
    benchmark = WeightDensity(output=tmp_path)
    text = benchmark.report([first])
    assert "### Weights of 3.1.weight, mnist1d, 2 workers (Fig. 11)" in text
    for method in METHODS:
        assert f"| {method.replace(':', ': ').replace(',', ', ')}, at the end |" in text
    benchmark.draw([first])
    assert_pictures(tmp_path, "weight_density")


@pytest.mark.parametrize("option", ["--task cubic", "--methods ddp ddp", "--epochs 0"])
def test_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("weight_density", option) != 0
    assert option.split()[0][2:] in capsys.readouterr().err
