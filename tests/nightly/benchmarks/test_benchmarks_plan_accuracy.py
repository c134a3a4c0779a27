"""How far plans are off: the benchmark, its tables and its picture."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plan_accuracy import Accuracy
from benchmarks.plan_accuracy_report import as_markdown, draw, extrapolated, outcomes, over_ddp, read
from lightning_pipesync.lab.plan.predictions import considered
from tests.nightly.benchmarks.bench_runs import run_command
from tests.nightly.lab.test_plan import WORK, cluster


def result(**changed: Any) -> dict[str, Any]:
    """Of a plan that recommends the second best of what was considered."""
    seconds = {"ddp:bucket_mb=1.0": 0.2, "ddp:bucket_mb=25.0": 0.3, "dear:a": 0.16, "dear:b": 0.15, "pipe_sgd": 0.1}
    predicted = {
        name: {"method": name.partition(":")[0], "seconds": took, "exact": name != "pipe_sgd", "shown": True}
        for name, took in {**seconds, "dear:a": 0.144, "pipe_sgd": 0.11, "ddp:bucket_mb=25.0": 0.15}.items()
    }
    for name in ("ddp:bucket_mb=25.0", "dear:b"):
        predicted[name]["shown"] = False
    return {
        "settings": {"model": "emulated-net"},
        "world_size": 4,
        "rate": "1gbit",
        "work": {"profile": {"forward": 0.03, "backward": 0.06, "tensors": [{"num_bytes": 2**21}]}},
        "predicted": predicted,
        "measured": {name: {"seconds": [took, 9.0, 0.9 * took]} for name, took in seconds.items()},
        "recommended": "dear:a",
        **changed,
    }


def test_errors_are_of_the_medians() -> None:
    found = outcomes(result())
    assert found["dear:a"].error == pytest.approx(-0.1)
    assert found["pipe_sgd"].error == pytest.approx(0.1)
    failed = result()
    failed["measured"]["pipe_sgd"] = {"error": "ValueError: no"}
    assert "pipe_sgd" not in outcomes(failed)


def test_a_method_and_ddp_are_compared_at_their_best() -> None:
    assert over_ddp(result(), "dear") == pytest.approx(0.2 / 0.15)
    assert over_ddp(result(), "ddp") == 1


def test_the_tables() -> None:
    """Errors of the plans' rows and of all settings; what is recommended beside the best."""
    lines = as_markdown([result()]).splitlines()
    rows = {
        cells[1].strip(): [cell.strip() for cell in cells[2:-1]]
        for cells in (line.split("|") for line in lines if line)
    }
    assert rows["ddp"] == ["1", "0.0%", "0%", "2", "25.0%", "50%"]
    assert rows["dear"] == ["1", "10.0%", "10%", "2", "5.0%", "10%"]
    assert rows["all"][:3] == ["3", "10.0%", "10%"]
    assert rows["net"] == ["4", "1gbit", "2", "90", "+0%", "-10%", "+10%", "dear", "-20.0%", "+6.7%"]


def test_costs_of_few_hosts_are_used_for_more() -> None:
    """Of links with that rate only; among 4 ranks an all-reduce takes 1.5 times as long as among 2."""
    costs = asdict(cluster(1e8, 2))
    costs["backend"]["ring_up_to"] = 4
    few = result(world_size=2, cluster=costs, work=asdict(WORK))
    more = result(world_size=4, cluster=asdict(cluster(5e7, 4)), work=asdict(WORK))
    names = [one.name for one in considered(WORK, cluster(1e8, 4)) if one.method in ("ddp", "pipe_sgd")]
    for one in considered(WORK, cluster(1e8, 4)):
        more["predicted"][one.name] = {"method": one.method, "seconds": 9.0, "exact": one.exact, "shown": True}
        more["measured"][one.name] = {"seconds": [2 * one.seconds] if one.name in names else []}
    more["measured"] = {name: one for name, one in more["measured"].items() if one["seconds"]}
    more["predicted"] = {name: more["predicted"][name] for name in more["measured"]}
    found = extrapolated([few, more])
    assert len(found) == len(names)
    assert all(one.error == pytest.approx(-0.5) for one in found)
    assert extrapolated([few, {**more, "rate": "50mbit"}]) == []
    assert extrapolated([few]) == []
    assert "more hosts, off by" in as_markdown([few, more])


def test_the_picture(tmp_path: Path) -> None:
    draw([result()], tmp_path / "accuracy.png")
    assert (tmp_path / "accuracy.png").stat().st_size > 20_000


def test_tensors_have_the_size_that_has_the_ratio() -> None:
    settings = Accuracy(compute_ms=100.0, ratio=(2.0,), steps=1, rounds=1)
    planned = settings.scaled_to(bandwidth=1e7, world_size=4)
    num_bytes = sum(4 * parameter.numel() for parameter in planned.build().module.parameters())
    assert 2 * 3 / 4 * num_bytes / 1e7 == pytest.approx(0.2, rel=0.02)
    assert settings.scaled_to(bandwidth=1e12, world_size=4).scale == 1.0


@pytest.mark.usefixtures("forked_ranks")
def test_plans_are_added_to_those_of_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--models emulated-alexnet --compute_ms 20 --ratio 0.002 --steps 1 --rounds 1"
    (tmp_path / "accuracy.json").write_text(json.dumps({"results": [result()]}))
    assert run_command("plan_accuracy", f"{options} --output {tmp_path}") == 0
    assert "off by" in capsys.readouterr().out
    assert "| alexnet | 2 |" in (tmp_path / "accuracy.md").read_text()
    before, now = read(tmp_path / "accuracy.json")
    assert before == result()
    found = outcomes(now)
    ours = {"dear", "pipe_sgd", "selsync", "local_sgd", "parameter_server"}
    assert {one.method for one in found.values()} >= {"ddp", *ours}
    assert found[now["recommended"]].exact
