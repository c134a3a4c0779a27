"""Accelerate's own test scripts with our Accelerator, and everything that `accelerate launch` starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from lightning_pipesync.cli import main
from tests.nightly.launch import accelerate_scripts
from tests.support.commands import ROOT, launched, processes_of
from tests.support.commands import environment as environment_with
from tests.support.harness import free_port, launch

CONFIGS = ROOT / "integrations" / "accelerate"
DIGITS = [str(ROOT / "examples" / "more" / "accelerate_methods.py"), "--epochs", "1"]
PIPESYNC = [sys.executable, "-m", "lightning_pipesync", "launch"]

# These set no optimizer's step off, and nobody reduces the gradients of a model whose optimizer is not prepared.
WITHOUT_OPTIMIZER = {
    "test_sync.distributed_sync",
    "test_sync.multiple_fwd",
    "test_sync.gradient_accumulation, sync_each_batch=False",
    "test_sync.gradient_accumulation, sync_each_batch=True",
}
# It looks for the averaged gradient in p.grad after a backward pass, where it is after the step at the earliest.
BEFORE_THE_STEP = {"test_sync.gradient_accumulation_with_opt_and_scheduler, sync_each_batch=True"}
# It looks for the averaged gradient in p.grad, and with DeAR no rank has all of it.
WHOLE_GRADIENT = {"test_sync.gradient_accumulation_with_opt_and_scheduler, sync_each_batch=False"}


def run_scripts(environment: dict[str, str]) -> dict[str, str]:
    os.environ.update({f"PIPESYNC_{name}": value for name, value in environment.items()})
    return accelerate_scripts.run()


#: Says which part of a sharded model each process has, and trains a step.
SHARDED = """
import torch
from lightning_pipesync import PipeSyncAccelerator
accelerator = PipeSyncAccelerator()
model = torch.nn.Linear(4, 6)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.ones(2, 4)).square().sum())
optimizer.step()
rows, replicas = model.module.weight.to_local().shape[0], accelerator.torch_device_mesh["dp_replicate"].size()
print(f"{type(model.method).__name__} between {replicas} replicas, {rows} rows here\\n", end="", flush=True)
accelerator.end_training()
"""


@pytest.mark.parametrize(
    ("environment", "failing"),
    [
        ({"METHOD": "dear"}, WITHOUT_OPTIMIZER | BEFORE_THE_STEP | WHOLE_GRADIENT),
        ({"METHOD": "selsync", "DELTA": "0", "AGGREGATION": "gradients"}, WITHOUT_OPTIMIZER | BEFORE_THE_STEP),
    ],
    ids=["dear", "selsync"],
)
def test_accelerates_own_scripts(environment: dict[str, str], failing: set[str]) -> None:
    for outcomes in launch(run_scripts, 2, environment, init=False):
        assert {name for name, error in outcomes.items() if error} == failing, outcomes
        assert {"test_script", "test_ops", "test_metrics.torch_metrics"} <= outcomes.keys()
        for name in WITHOUT_OPTIMIZER:
            assert "its optimizer was not prepared" in outcomes[name]


def test_a_sharded_model(tmp_path: Path) -> None:
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED)
    options = ["--config_file", str(CONFIGS / "sharded.yaml"), "--main_process_port", str(free_port())]
    [status], output = launched(("pipesync", ["launch", *options, str(script)]), folder=tmp_path, ranks=4)
    assert status == 0, output
    assert output.count("DeAR between 2 replicas, 3 rows here") == 4, output


def test_the_file_for_gpus_differs_from_that_for_a_cpu_by_the_device() -> None:
    """Accelerate can read it; here it has no GPUs to use."""
    cpu, gpus = (load_config_from_file(str(CONFIGS / name)).to_dict() for name in ("cpu.yaml", "gpus.yaml"))
    different = {name for name in cpu | gpus if cpu.get(name) != gpus.get(name)}
    assert {"use_cpu", "num_processes"} <= different, different
    assert not gpus["use_cpu"]


def test_two_machines(tmp_path: Path) -> None:
    """The file for two machines, here twice on this one, with a process each; EA-Pipe needs no more of a launcher."""
    options = ["--config_file", str(CONFIGS / "two_machines.yaml"), "--main_process_ip", "127.0.0.1"]
    options += ["--main_process_port", str(free_port()), "--num_processes", "2", "--same_network"]
    machines = [("accelerate", [*options, "--machine_rank", rank, *DIGITS]) for rank in "01"]
    statuses, output = launched(*machines, folder=tmp_path, PIPESYNC_METHOD="ea_pipe")
    assert statuses == [0, 0], output
    assert "ea_pipe on 2 processes: test accuracy" in output


def test_a_wrong_setting_ends_all_workers_and_one_process_in_place_of_two_is_told(tmp_path: Path) -> None:
    """The latter is what `accelerate launch --cpu` does without a word."""
    script = tmp_path / "script.py"
    script.write_text("from lightning_pipesync import PipeSyncAccelerator; PipeSyncAccelerator().end_training()")
    options = ["--config_file", CONFIGS / "cpu.yaml", "--main_process_port", free_port(), script]
    variables = {"PIPESYNC_METHOD": "dear", "PIPESYNC_BUFFERMB": "4"}
    [status], output = launched(("accelerate", options), folder=tmp_path, **variables)
    assert status != 0
    assert "method='dear' has no setting 'buffermb'. It has: update, elementwise" in output
    command = ("accelerate", ["--cpu", "--num_processes", 2, script])
    _, output = launched(command, folder=tmp_path, ranks=1, PIPESYNC_METHOD="dear")
    assert "asked for several processes, and has started this one only" in output


@pytest.mark.parametrize("ignored", [True, False], ids=["ignored", "as usual"])
def test_a_hangup_ends_pipesync_launch_unless_it_is_ignored(ignored: bool, tmp_path: Path) -> None:
    """``nohup`` has it ignored: the training then outlives the terminal."""
    script = tmp_path / "wait.py"
    script.write_text("import time; print('a worker waits', flush=True); time.sleep(200)")
    options = ["--config_file", str(CONFIGS / "selsync_cpu.yaml"), "--num_processes", "1"]

    def nohup() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)

    mark = uuid4().hex
    process = subprocess.Popen(
        [*PIPESYNC, *options, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment_with(TEST_LAUNCH=mark),
        preexec_fn=nohup,
    )
    try:
        assert process.stdout is not None
        seen = [""]
        while "a worker waits" not in seen[-1]:
            seen.append(process.stdout.readline())
            assert seen[-1], f"it has ended early: {''.join(seen)}"
        process.send_signal(signal.SIGHUP)
        if ignored:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1)
            process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 128 + (signal.SIGTERM if ignored else signal.SIGHUP), output
    finally:
        left = processes_of(mark)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert not left, left


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (None, "no section 'pipesync:'"),
        ({"method": "selsink"}, "method must be one of dear, ea_pipe, local_sgd, parameter_server, pipe_sgd, selsync"),
        ({"method": "selsync", "detla": 0.3}, "no setting 'detla'. It has: delta, lssr, follow_lr"),
        ({"method": "selsync", "delta": [1]}, "delta"),
        ({"delta": 0.3}, "does not name a method"),
        ("selsync", "does not name a method"),
    ],
)
def test_pipesync_launch_checks_before_it_starts(
    section: Any, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script is never run: it does not even exist."""
    content = yaml.safe_load((CONFIGS / "selsync_cpu.yaml").read_text())
    content.pop("pipesync")
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(content if section is None else {**content, "pipesync": section}))
    assert main(["launch", "--config_file", str(file), "nowhere.py"]) == 2
    assert words in capsys.readouterr().err
    assert not any(name.startswith("PIPESYNC_") for name in os.environ)


def test_pipesync_launch_needs_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "nowhere.py"]) == 2
    assert "or --config_file FILE" in capsys.readouterr().err
    assert main(["launch", "--config_file", str(tmp_path / "none.yaml"), "nowhere.py"]) == 2
    assert "none.yaml cannot be read" in capsys.readouterr().err
