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

from lightning_pipesync.core.extras import is_installed
from tests.support.commands import ROOT, launched
from tests.support.harness import launch

EXAMPLES = ROOT / "examples"


#: Leaves 64 of scikit-learn's images.
FEW_IMAGES = """
from sklearn import datasets
images, digits = datasets.load_digits(return_X_y=True)
datasets.load_digits = lambda return_X_y: (images[:64], digits[:64])
"""
#: What the smallest examples say at their end, by script.
SMALLEST = {
    "lightning_digits.py": "DeAR: 10 steps",
    "fabric_digits.py": "epoch 5: loss ",
    "accelerate_digits.py": "epoch 5: loss ",
    "plain_loop_digits.py": "epoch 5: loss ",
    "transformers_digits.py": "10/10",
}


def run_here(command: list[str], is_rank: bool, prepare: str = "") -> subprocess.CompletedProcess[str]:
    """Runs a script in this process, as a rank or as the process that starts (forked) ranks."""
    os.environ["COLUMNS"] = "80"
    exec(prepare, {})
    if not is_rank:
        for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE"):
            del os.environ[name]
        multiprocessing.spawn = partial(multiprocessing.start_processes, start_method="fork")
    sys.argv = command
    sys.path.insert(0, os.path.dirname(command[0]))
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
    return launch(run_here, num_ranks, command, num_ranks > 1, init=False)


def printed_by(num_ranks: int, script: str, *options: object, may_warn: bool = False) -> str:
    """Runs a script, which must succeed; returns what the first process has printed."""
    results = run_forked(num_ranks, script, *options)
    for result in results:
        assert result.returncode == 0, result.stderr
        assert may_warn or "Warning" not in result.stderr, result.stderr
    return results[0].stdout


@pytest.mark.parametrize("script", SMALLEST)
def test_the_smallest(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = launch(run_here, 2, [str(EXAMPLES / script)], True, FEW_IMAGES, init=False)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert SMALLEST[script] in first.stdout + first.stderr
    assert SMALLEST[script] not in second.stdout + second.stderr, "each process trains alone"


@pytest.mark.skipif(not is_installed("torchft"), reason="torchft is not installed")
def test_replicas(tmp_path: Path) -> None:
    script = tmp_path / "few_images.py"
    words = f"""
import runpy, sys
sys.path.insert(0, {str(EXAMPLES)!r})
runpy.run_path({str(EXAMPLES / "replicas_digits.py")!r}, run_name="__main__")
"""
    script.write_text(FEW_IMAGES + words)
    [status], output = launched(("pipesync", ["launch", "--replicas", "2", str(script)]), folder=tmp_path)
    assert status == 0, output
    for replica in range(2):
        assert f"[replica {replica}] LocalSGD: 4 rounds in 40 steps" in output


def test_digits(tmp_path: Path) -> None:
    output = tmp_path / "new" / "folder"
    printed = printed_by(1, "more/digits.py", "--epochs", 2, "--output", output)
    results = json.loads((output / "results.json").read_text())["results"][0]
    for row in results["table"]:
        [line] = [line for line in printed.splitlines() if line.startswith(f"  {row['strategy']}  ")]
        assert f"{row['mib_sent']:.0f}" in line
        assert f"{100 * row['difference']:+.2f}" in line
        assert row["steps"] == 38  # of 1,197 images on 2 processes, 32 at a step
    ddp, dear, few_bits, selsync, local_sgd = results["table"]
    assert [row["strategy"] for row in results["table"]] == ["ddp", "dear", "dear, 4 bits", "selsync", "local_sgd"]
    assert ddp["times_as_fast"] == 1
    assert ddp["difference"] == dear["difference"] == 0
    assert few_bits["mib_sent"] < ddp["mib_sent"] / 4
    assert selsync["mib_sent"] < ddp["mib_sent"]
    assert local_sgd["mib_sent"] < ddp["mib_sent"] / 3
    accuracies = {run["strategy"]: run["accuracies"] for run in results["runs"]}
    assert accuracies["dear"] == accuracies["ddp"]
    assert "selsync       seed 0  epoch  2 of 2" in printed
    assert (output / "digits.png").read_bytes().startswith(b"\x89PNG")


def test_slow_network_by_delays(tmp_path: Path) -> None:
    options = ["--epochs", 1, "--strategies", "ddp", "selsync", "--output", tmp_path]
    words = ["--rate", "100mbit", "--delays", EXAMPLES / "more/digits.py", *options]
    assert "2 ranks, 100mbit, by delays" in printed_by(2, "more/slow_network.py", *words, may_warn=True)
    ddp = json.loads((tmp_path / "results.json").read_text())["results"][0]["table"][0]
    assert ddp["seconds"] > ddp["mib_sent"] * 2**20 * 8 / 100e6, "as long as the messages take at that rate, at least"


def test_pydoc_transformer() -> None:
    printed = printed_by(2, "more/pydoc_transformer.py", "--max-steps", 3)
    assert "selsync on 2 processes, 3 steps" in printed
    numbers = {line.rsplit(maxsplit=1)[0]: line.split()[-1] for line in printed.splitlines() if "  " in line}
    assert 1 < float(numbers["perplexity per character"]) < 103  # the size of the alphabet
    assert 0 <= float(numbers["LSSR"]) <= 1
    assert float(numbers["MiB sent by rank 0"]) > 0


@pytest.mark.parametrize("options", [[], ["--trainer"]], ids=["accelerate", "trainer"])
def test_accelerate_llama(options: list[str]) -> None:
    printed = printed_by(4, "more/accelerate_llama.py", "--steps", 6, *options, may_warn=True)
    assert "dear between 2 hosts of 2 ranks, 6 steps" in printed
    [losses] = [line.split()[-2:] for line in printed.splitlines() if "loss of the" in line]
    assert float(losses[1]) < float(losses[0]) - 0.3


def test_sharded_llama() -> None:
    """Under a Trainer and in Fabric the losses are the same."""
    heads, losses = [], []
    for line in printed_by(4, "more/sharded_llama.py", "--max-steps", 4, "--context", 16).splitlines():
        (losses if line.startswith("  ") else heads).append(line)
    assert heads == [f"dear, {loop}, 2 replicas of 2 ranks" for loop in ("trainer", "fabric")]
    assert losses[:2] == losses[2:]
    first, last = (float(line.split()[-1]) for line in losses[:2])
    assert last < first


def test_pipeline_digits() -> None:
    printed = printed_by(2, "more/pipeline_digits.py", "--epochs", 3)
    assert "ea_pipe on 2 processes, 222 mini-batches" in printed
    assert float(printed.partition("test accuracy")[2].split("%")[0]) > 70


def test_non_iid_digits() -> None:
    printed = printed_by(1, "more/non_iid_digits.py", "--steps", 80, "--injection", 0.5, 0.5)
    rows = [line.split("│")[1:5] for line in printed.splitlines() if "%" in line]
    assert [name.strip() for name, *_ in rows] == ["synchronous SGD", "SelSync", "+ injection (0.5, 0.5)"]
    [synchronous, selsync, injected] = [[float(number.strip().rstrip("%")) for number in row[1:]] for row in rows]
    assert synchronous[1] == 0
    assert selsync[0] + 5 < injected[0]  # accuracy
    assert synchronous[0] - 8 < injected[0]
    assert min(selsync[1], injected[1]) > 90  # local steps
    assert max(selsync[2], injected[2]) < synchronous[2] / 3  # MiB


def test_failed_run_fails_the_script(tmp_path: Path) -> None:
    for result in run_forked(2, "more/digits.py", "--batch-size", 0, "--output", tmp_path):
        assert result.returncode != 0
        assert "batch_size should be a positive integer" in result.stderr
    assert not (tmp_path / "results.json").exists()
