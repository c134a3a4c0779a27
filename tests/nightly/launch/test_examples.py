"""The examples, run as by a user, except that all processes are forked."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from functools import partial
from pathlib import Path

import pytest
from torch import multiprocessing

from tests.support.harness import on_ranks

EXAMPLES = Path(__file__).parents[3] / "examples"


def run_here(command: list[str], is_rank: bool) -> subprocess.CompletedProcess[str]:
    """Runs a script in this process, as a rank or as the process that starts (forked) ranks."""
    os.environ["COLUMNS"] = "80"
    if not is_rank:
        for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE"):
            del os.environ[name]
        multiprocessing.spawn = partial(multiprocessing.start_processes, start_method="fork")
    sys.argv = command
    sys.path.insert(0, str(EXAMPLES))
    status = 0
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        os.dup2(stdout.fileno(), 1)
        os.dup2(stderr.fileno(), 2)
        try:
            runpy.run_path(command[0], run_name="__main__")
        except SystemExit as end:
            status = int(end.code or 0)
        except BaseException:
            status = 1
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        texts = []
        for stream in (stdout, stderr):
            stream.seek(0)
            texts.append(stream.read())
    return subprocess.CompletedProcess(command, status, *texts)


def run_forked(num_ranks: int, script: str, *options: object) -> list[subprocess.CompletedProcess[str]]:
    """Runs a script in forked processes, which need not import torch: two ranks, or a process that is no rank."""
    command = [str(EXAMPLES / script), *map(str, options)]
    return on_ranks(run_here, num_ranks, command, num_ranks > 1, init=False)


def test_digits(tmp_path: Path) -> None:
    output = tmp_path / "new" / "folder"
    [result] = run_forked(1, "digits.py", "--epochs", 2, "--output", output)
    assert result.returncode == 0, result.stderr
    assert "Warning" not in result.stderr

    results = json.loads((output / "results.json").read_text())["results"][0]
    for row in results["table"]:
        [line] = [line for line in result.stdout.splitlines() if line.startswith(f"  {row['strategy']} ")]
        assert f"{row['mib_sent']:.1f}" in line
        assert row["steps"] == 38  # of 1,197 images on 2 processes, 32 at a step
        assert row["seconds"] > 0
    ddp, _, selsync, local_sgd = results["table"]
    assert [row["strategy"] for row in results["table"]] == ["ddp", "dear", "selsync", "local_sgd"]
    assert ddp["times_as_fast"] == 1
    assert selsync["mib_sent"] < ddp["mib_sent"]
    assert local_sgd["mib_sent"] < ddp["mib_sent"] / 3
    accuracies = {run["strategy"]: run["accuracies"] for run in results["runs"]}
    assert accuracies["dear"] == accuracies["ddp"]
    assert len(accuracies["selsync"]) == 2
    assert "selsync    seed 0  epoch  2 of 2" in result.stdout
    assert (output / "digits.png").read_bytes().startswith(b"\x89PNG")


def test_slow_network_by_delays(tmp_path: Path) -> None:
    options = ["--epochs", 1, "--strategies", "ddp", "selsync", "--output", tmp_path]
    results = run_forked(2, "slow_network.py", "--rate", "100mbit", "--delays", EXAMPLES / "digits.py", *options)
    for result in results:
        assert result.returncode == 0, result.stderr
    assert "2 ranks, 100mbit, by delays" in results[0].stdout
    ddp = json.loads((tmp_path / "results.json").read_text())["results"][0]["table"][0]
    assert ddp["seconds"] > ddp["mib_sent"] * 2**20 * 8 / 100e6


def test_pydoc_transformer() -> None:
    result, _ = run_forked(2, "pydoc_transformer.py", "--max-steps", 3)
    assert result.returncode == 0, result.stderr
    assert "Warning" not in result.stderr
    assert "selsync on 2 processes, 3 steps" in result.stdout
    numbers = {line.rsplit(maxsplit=1)[0]: line.split()[-1] for line in result.stdout.splitlines() if "  " in line}
    assert 1 < float(numbers["perplexity per character"]) < 103  # the size of the alphabet
    assert 0 <= float(numbers["LSSR"]) <= 1
    assert float(numbers["MiB sent by rank 0"]) > 0


@pytest.mark.parametrize("options", [[], ["--trainer"]], ids=["accelerate", "trainer"])
def test_accelerate_llama(options: list[str]) -> None:
    pytest.importorskip("accelerate.parallelism_config", reason="Accelerate 1.3 has no ParallelismConfig")
    first, *_ = run_forked(4, "accelerate_llama.py", "--steps", 6, *options)
    assert first.returncode == 0, first.stderr
    assert "dear between 2 hosts of 2 ranks, 6 steps" in first.stdout
    [losses] = [line.split()[-2:] for line in first.stdout.splitlines() if "loss of the" in line]
    assert float(losses[1]) < float(losses[0]) - 0.3


def test_sharded_llama() -> None:
    """Under a Trainer and in Fabric the losses are the same."""
    result, *_ = run_forked(4, "sharded_llama.py", "--max-steps", 4, "--context", 16)
    assert result.returncode == 0, result.stderr
    assert "Warning" not in result.stderr
    heads, losses = [], []
    for line in result.stdout.splitlines():
        (losses if line.startswith("  ") else heads).append(line)
    assert heads == [f"dear, {loop}, 2 replicas of 2 ranks" for loop in ("trainer", "fabric")]
    assert losses[:2] == losses[2:]
    first, last = (float(line.split()[-1]) for line in losses[:2])
    assert last < first


def test_pipeline_digits() -> None:
    first, second = run_forked(2, "pipeline_digits.py", "--epochs", 3)
    for result in (first, second):
        assert result.returncode == 0, result.stderr
        assert "Warning" not in result.stderr
    assert "ea_pipe on 2 processes, 222 mini-batches" in first.stdout
    assert float(first.stdout.partition("test accuracy")[2].split("%")[0]) > 70


def test_non_iid_digits() -> None:
    [result] = run_forked(1, "non_iid_digits.py", "--steps", 80, "--injection", 0.5, 0.5)
    assert result.returncode == 0, result.stderr
    assert "Warning" not in result.stderr
    rows = [line.split("│")[1:5] for line in result.stdout.splitlines() if "%" in line]
    assert [name.strip() for name, *_ in rows] == ["synchronous SGD", "SelSync", "+ injection (0.5, 0.5)"]
    [synchronous, selsync, injected] = [[float(number.strip().rstrip("%")) for number in row[1:]] for row in rows]
    assert synchronous[1] == 0
    assert selsync[0] + 5 < injected[0]  # accuracy
    assert synchronous[0] - 8 < injected[0]
    assert min(selsync[1], injected[1]) > 90  # local steps
    assert max(selsync[2], injected[2]) < synchronous[2] / 3  # MiB


def test_help() -> None:
    [result] = run_forked(1, "non_iid_digits.py", "--help")
    assert "--injection ALPHA BETA" in result.stdout


@pytest.mark.parametrize(
    ("script", "options", "word"),
    [
        ("overhead.py", ["--steps", 2, "--batch_size", 1, "--sequence", 4], "tracker"),
        ("selsync_overhead.py", ["--steps", 10, "--rounds", 1], "SelDP"),
        ("codecs.py", ["--mib", 1, "--rounds", 2], "truncate16"),
    ],
)
def test_benchmarks(script: str, options: list[object], word: str, tmp_path: Path) -> None:
    [result] = run_forked(1, f"../benchmarks/{script}", *options, "--output", tmp_path)
    assert result.returncode == 0, result.stderr
    assert word in result.stdout


def test_failed_run_fails_the_script(tmp_path: Path) -> None:
    for result in run_forked(2, "digits.py", "--batch-size", 0, "--output", tmp_path):
        assert result.returncode != 0
        assert "batch_size should be a positive integer" in result.stderr
    assert not (tmp_path / "results.json").exists()
