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
from lightning_pipesync.lab.bench import benchmark
from lightning_pipesync.lab.bench.step import COLUMNS, Step, as_markdown, rows_of
from lightning_pipesync.lab.bench.tables import show, table
from lightning_pipesync.lab.bench.timing import Timed, median_and_quartiles, time_round_robin
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
    rows = {row.name: row for row in rows_of(step_result()["runs"][0])}
    assert rows["quick"].over_ddp == pytest.approx(0.4 / 0.32), "DDP with its best bucket size"
    assert rows["quick"].of_limit == pytest.approx(0.3 / 0.32)
    assert rows["DDP, 1 MiB"].exposed == pytest.approx(0.2)
    assert rows["DDP, 25 MiB"].prediction_error == pytest.approx(0.1)
    assert rows["quick"].prediction_error is None
    assert rows["quick"].scaling_efficiency == pytest.approx(0.95)
    assert rows["no communication"].scaling_efficiency == 1.0
    text = as_markdown([step_result()])
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
    show(as_markdown([result]))
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert {*name.split(), "1234", "1167-1289", *" ".join(COLUMNS).split()} <= {*shown.split()}
    monkeypatch.setenv("COLUMNS", "40")
    cells = [f"method_{number}" for number in range(9)]
    show(table(["", *cells[1:]], [cells]))
    assert cells in [line.split() for line in capsys.readouterr().out.splitlines()]


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
        ours = ["dear", "selsync, synchronized step", "selsync, local step"]
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
    assert benchmark._run_here([sys.executable, "-S", "-c", script], 1, lambda _, line: lines.append(line)) == 1
    assert "Address already in use" in lines[-1]


def test_a_benchmark_that_is_ended_leaves_no_ranks(tmp_path: Path) -> None:
    """Otherwise those of ``timeout 600 pipesync bench``, or of a job beyond its limit, disturb what comes next."""
    rank = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    script = f"""
import sys
from lightning_pipesync.lab.bench.benchmark import _run_here
_run_here([sys.executable, "-S", "-c", {rank!r}], 2, lambda rank, line: print(line, end="", flush=True))
"""
    words = [sys.executable, "-c", script]
    with subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ranks = [int(process.stdout.readline()) for _ in range(2)]
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert not any(Path(f"/proc/{rank}/cmdline").exists() for rank in ranks)
