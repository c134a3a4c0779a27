"""``pipesync bench``: what its tables say of what was measured, by hand; and a step that is timed on two ranks."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.lab.bench import converge_report, job, step_report, timeline
from lightning_pipesync.lab.bench.round_robin import Timed, median_and_quartiles, time_round_robin
from lightning_pipesync.lab.bench.step import Step
from lightning_pipesync.lab.bench.tables import show, table
from tests.support.bench_runs import assert_pictures, result_of
from tests.support.case_table import launch_cases
from tests.support.commands import environment

# --- arithmetic -------------------------------------------------------------------------------------------------------


def test_quartiles() -> None:
    assert median_and_quartiles([3.0, 1.0, 2.0, 4.0, 5.0]) == (3.0, 2.0, 4.0)
    assert median_and_quartiles([7.0]) == (7.0, 7.0, 7.0)


def step_result() -> dict[str, Any]:
    cost = {"forward": 0.1, "backward": 0.2, "update": 0.0, "reduce_scatter": 0.15, "all_gather": 0.15}
    names = {"no communication": 0.304, "DDP, 1 MiB": 0.5, "DDP, 25 MiB": 0.4, "quick": 0.32}
    shared = {"processor_seconds": [0.04, 0.05, 0.06], "limit": 0.3, "layer_limit": 0.348, "search": None}
    candidates = [
        {"name": name, "seconds": [seconds] * 3, "predicted": 0.44 if "25" in name else None, **shared}
        for name, seconds in names.items()
    ]
    run = {"num_bytes": MIB, "cost": cost, "candidates": candidates}
    return {"settings": {"model": "emulated-resnet50"}, "world_size": 2, "bandwidth": 1e8, "runs": [run]}


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


def test_no_name_and_no_number_of_a_table_is_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of steps has 80 columns; one that does not fit has long lines."""
    monkeypatch.setenv("COLUMNS", "80")
    result = step_result()
    name = "selsync (overlap=forward, compression=int8), synchronized step, 25 MiB"
    seconds = {"seconds": [1.1, 1.234, 1.345], "processor_seconds": [1.234]}
    result["runs"][0]["candidates"].append({**result["runs"][0]["candidates"][-1], "name": name, **seconds})
    show(step_report.as_markdown([result]))
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert {*name.split(), "1234", "1167-1289", *" ".join(step_report.COLUMNS).split()} <= {*shown.split()}
    monkeypatch.setenv("COLUMNS", "40")
    cells = [f"method_{number}" for number in range(9)]
    show(table(["", *cells[1:]], [cells]))
    assert cells in [line.split() for line in capsys.readouterr().out.splitlines()]


def test_time_that_is_hidden() -> None:
    """Forward for 3 s, then communication for 4 s, half of it under 2 s of backward."""
    spans = [("forward", 0, 2), ("forward", 2, 3), ("all-reduce", 3, 6), ("all-reduce", 5, 7), ("backward", 3, 5)]
    spans_as_saved = [{"kind": kind, "number": 0, "start": start, "end": end} for kind, start, end in spans]
    text = timeline.as_markdown({"timelines": [{"name": "one", "spans": spans_as_saved, "steps": [7.0]}]})
    assert "| one | 7000 | 5000 | 4000 | 50% |" in text


def trainings(points: dict[str, list[list[float]]], higher_is_better: bool, target: float) -> dict[str, Any]:
    """Two evaluations, after 10 and 20 steps; one training for each list of qualities."""

    def point(method: str, i: int, quality: float) -> dict[str, float]:
        seconds = (i + 1) * (2.0 if method == "ddp" else 1.0)
        sent = {"mib": 5.0, "consolidation_mib": 0.5 * i}
        return {"steps": 10 * (i + 1), "seconds": seconds, "quality": quality, "spread": 0.01 * (i + 1), **sent}

    runs = [
        {"method": method, "seed": seed, "lssr": 0.5, "points": [point(method, i, q) for i, q in enumerate(qualities)]}
        for method, seeds in points.items()
        for seed, qualities in enumerate(seeds)
    ]
    settings = {"task": "digits", "seeds": [0, 1], "evaluations": 2, "labels_per_worker": 5}
    shared = {"higher_is_better": higher_is_better, "target": target, "world_size": 2}
    return {"settings": settings, "metric": "test accuracy %", "runs": runs, **shared}


def test_rows_of_the_table_of_trainings() -> None:
    qualities = {
        "quick:x=1": [[99.0, 98.0], [99.0, 99.5]],
        "ddp": [[90.0, 98.5], [98.0, 98.5]],
        "lucky": [[99, 1], [1, 2]],
        "alone": [[1, 2], [1, 2]],
    }
    result = trainings(qualities, True, 98.5)
    quick, ddp, lucky = converge_report.rows_of(result)
    assert (quick.steps, quick.seconds, quick.num_reached, quick.speedup) == (10, 1.0, 2, 4.0)
    assert (quick.best, quick.difference, quick.final, quick.spread) == (99.25, 0.75, 98.75, 0.015)
    assert quick.difference_interval == pytest.approx(12.706 * 0.25, rel=1e-4), "of 99 - 98.5 and 99.5 - 98.5"
    assert quick.best_interval == pytest.approx(12.706 * 0.25, rel=1e-4), "Student's t with one degree of freedom"
    assert (ddp.steps, ddp.seconds, ddp.speedup, ddp.difference) == (20, 4.0, 1.0, 0.0)
    assert (lucky.num_reached, lucky.steps, lucky.speedup, lucky.share_of_limit) == (1, None, None, None)
    assert (quick.share_of_limit, ddp.share_of_limit) == (2.0, 0.5), "DDP's 20 steps of 0.1 s"
    quality = "99.25 ± 3.18 | +0.75 ± 3.18 | 98.75 ± 9.53 | 1.50%"
    row = f"| quick: x=1 | 10 | 0.500 | {quality} | 2 of 2 | 5.0 | 100 | 1.0 | 4.00 | 200% |"
    assert row in converge_report.as_markdown([result])
    result = trainings({"ddp": [[7.0, 5.0], [7.0, 5.0]], "worse": [[6.0, 5.5], [6.0, 5.5]]}, False, 6.0)
    ddp, worse = converge_report.rows_of(result)  # of which a lower perplexity is better
    assert (ddp.steps, ddp.best) == (20, 5.0)
    assert (worse.steps, worse.best, worse.difference) == (10, 5.5, -0.5)


# --- ranks ------------------------------------------------------------------------------------------------------------


def turns() -> tuple[list[str], dict[str, Timed]]:
    calls: list[str] = []
    operations = {
        "slow on rank 1": lambda: (calls.append("a"), time.sleep(0.05 * dist.get_rank())),
        "quick": lambda: calls.append("b"),
    }
    timed = time_round_robin(operations, 2, before=lambda name: calls.append(f"before {name[0]}"))
    return calls, timed


def test_operations_take_turns_and_the_slowest_rank_counts() -> None:
    for calls, timed in launch_cases({"turns": turns}, 2)["turns"]:
        assert calls == ["before s", "a", "before q", "b"] * 3, "one round is not counted"
        assert len(timed["quick"].seconds) == len(timed["quick"].processor_seconds) == 2
        assert min(timed["slow on rank 1"].seconds) >= 0.05


@pytest.mark.usefixtures("forked_ranks")
def test_a_step_is_timed(tmp_path: Path) -> None:
    """Each candidate is there, DDP is predicted, and there is a picture."""
    options = "--hosts 2 --model emulated-alexnet --scale 0.001 --ratio 0.5 2 --steps 1 --rounds 1 --bucket_mb 1 25"
    result = result_of("bench step", options, tmp_path)
    assert len(result["runs"]) == 2
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


def test_the_port_of_the_ranks_is_taken_before_they_start() -> None:
    """Otherwise a rank that is early may connect to itself there, and rank 0 could not open its store."""
    lines: list[str] = []
    script = "import os, socket; socket.create_server(('127.0.0.1', int(os.environ['MASTER_PORT'])))"
    assert job._run_here([sys.executable, "-S", "-c", script], 1, lambda _, line: lines.append(line)) == 1
    assert "Address already in use" in lines[-1]


def test_a_benchmark_that_is_ended_leaves_no_ranks(tmp_path: Path) -> None:
    """Otherwise those of ``timeout 600 pipesync bench``, or of a job beyond its limit, disturb what comes next."""
    rank = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    script = f"""
import sys
from lightning_pipesync.lab.bench.job import _run_here
_run_here([sys.executable, "-S", "-c", {rank!r}], 2, lambda rank, line: print(line, end="", flush=True))
"""
    words = [sys.executable, "-c", script]
    with subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ranks = [int(process.stdout.readline()) for _ in range(2)]
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert not any(Path(f"/proc/{rank}/cmdline").exists() for rank in ranks)
