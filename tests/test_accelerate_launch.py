"""Accelerate's own test scripts with our Accelerator, and everything that `accelerate launch` starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from lightning_pipesync.cli import main
from tests import accelerate_scripts
from tests.harness import default_signals, free_port, launch

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "integrations" / "accelerate"
DIGITS = [str(ROOT / "examples" / "accelerate_digits.py"), "--epochs", "1"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
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


@pytest.mark.parametrize(
    ("environment", "failing"),
    [
        ({"METHOD": "dear"}, WITHOUT_OPTIMIZER | BEFORE_THE_STEP | WHOLE_GRADIENT),
        ({"METHOD": "selsync", "DELTA": "0", "AGGREGATION": "gradients"}, WITHOUT_OPTIMIZER | BEFORE_THE_STEP),
        ({"METHOD": "pipe_sgd", "STALENESS": "0"}, WITHOUT_OPTIMIZER | BEFORE_THE_STEP),
    ],
    ids=["dear", "selsync", "pipe_sgd"],
)
def test_accelerates_own_scripts(environment: dict[str, str], failing: set[str]) -> None:
    for outcomes in launch(partial(run_scripts, environment), 2, init=False, timeout_s=300):
        assert {name for name, error in outcomes.items() if error} == failing, outcomes
        assert {"test_script", "test_ops", "test_metrics.torch_metrics"} <= outcomes.keys()
        for name in WITHOUT_OPTIMIZER:
            assert "its optimizer was not prepared" in outcomes[name]


class Launch:
    """A launcher, whose workers can be told from all other processes, whatever session they are in.

    Args:
        command: the launcher's.
        before: called in the launcher's process before it begins.
        environment: further variables.
    """

    def __init__(self, command: list[str], before: Callable[[], None] = default_signals, **environment: str) -> None:
        self.mark = f"TEST_LAUNCH={uuid4().hex}"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIPESYNC_", "ACCELERATE_"))}
        self.process = subprocess.Popen(
            command,
            env={**kept, **environment, "OMP_NUM_THREADS": "1", "TEST_LAUNCH": self.mark.partition("=")[2]},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=before,
        )

    def finish(self) -> tuple[int, str]:
        """Waits, and returns the exit status and what it and its workers wrote; none of them is left running."""
        try:
            output, _ = self.process.communicate(timeout=240)
        finally:
            left = self.processes()
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        assert not left, left
        return self.process.returncode, output

    def processes(self) -> list[int]:
        """The living processes of this launch, the launcher first."""
        found = []
        for status in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                environment = (status.parent / "environ").read_bytes().split(b"\0")
                if self.mark.encode() in environment and status.read_text().rsplit(")", 1)[1].split()[0] != "Z":
                    found.append(int(status.parent.name))
        return sorted(found)


def test_pipesync_launch() -> None:
    options = ["--config_file", str(CONFIGS / "selsync_cpu.yaml"), "--main_process_port", str(free_port())]
    status, output = Launch([*PIPESYNC, *options, *DIGITS]).finish()
    assert status == 0, output
    assert "selsync on 2 processes: test accuracy" in output
    assert "Warning" not in output.replace("UserWarning: OMP_NUM_THREADS", "")


def test_the_file_for_gpus_differs_from_that_for_a_cpu_by_the_device() -> None:
    """Accelerate can read it; here it has no GPUs to use."""
    cpu, gpus = (load_config_from_file(str(CONFIGS / name)).to_dict() for name in ("cpu.yaml", "gpus.yaml"))
    different = {name for name in cpu | gpus if cpu.get(name) != gpus.get(name)}
    assert {"use_cpu", "num_processes"} <= different, different
    assert not gpus["use_cpu"]


def test_two_machines() -> None:
    """The file for two machines, here twice on this one, with a process each; EA-Pipe needs no more of a launcher."""
    options = ["--config_file", str(CONFIGS / "two_machines.yaml"), "--main_process_ip", "127.0.0.1"]
    options += ["--main_process_port", str(free_port()), "--num_processes", "2", "--same_network"]
    machines = [
        Launch([*ACCELERATE, *options, "--machine_rank", rank, *DIGITS], PIPESYNC_METHOD="ea_pipe") for rank in "01"
    ]
    (status, output), (other_status, other) = [machine.finish() for machine in machines]
    assert (status, other_status) == (0, 0), output + other
    assert "ea_pipe on 2 processes: test accuracy" in output


@pytest.fixture
def script(tmp_path: Path) -> str:
    """Makes an accelerator, and no more."""
    path = tmp_path / "script.py"
    path.write_text("from lightning_pipesync import PipeSyncAccelerator; PipeSyncAccelerator().end_training()")
    return str(path)


def test_a_wrong_setting_ends_all_workers(script: str) -> None:
    options = ["--config_file", str(CONFIGS / "cpu.yaml"), "--main_process_port", str(free_port())]
    launched = Launch([*ACCELERATE, *options, script], PIPESYNC_METHOD="dear", PIPESYNC_BUFFERMB="4")
    status, output = launched.finish()
    assert status != 0
    assert "method='dear' has no setting 'buffermb'. It has: update, elementwise" in output


def test_one_process_in_place_of_two(script: str) -> None:
    """What `accelerate launch --cpu` does without a word."""
    command = [*ACCELERATE, "--cpu", "--num_processes", "2", script]
    _, output = Launch(command, PIPESYNC_METHOD="dear").finish()
    assert "asked for several processes, and has started this one only" in output


@pytest.mark.parametrize("ignored", [True, False], ids=["ignored", "as usual"])
def test_a_hangup_ends_pipesync_launch_unless_it_is_ignored(ignored: bool, tmp_path: Path) -> None:
    """``nohup`` has it ignored: the training then outlives the terminal."""
    script = tmp_path / "wait.py"
    script.write_text("import time; print('a worker waits', flush=True); time.sleep(200)")
    options = ["--config_file", str(CONFIGS / "selsync_cpu.yaml"), "--num_processes", "1"]

    def nohup() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)

    launched = Launch([*PIPESYNC, *options, str(script)], nohup)
    assert launched.process.stdout is not None
    seen = [""]
    while "a worker waits" not in seen[-1]:
        seen.append(launched.process.stdout.readline())
        assert seen[-1], f"it has ended early: {''.join(seen)}"
    launched.process.send_signal(signal.SIGHUP)
    if ignored:
        with pytest.raises(subprocess.TimeoutExpired):
            launched.process.wait(3)
        launched.process.send_signal(signal.SIGTERM)
    status, output = launched.finish()
    assert status == 128 + (signal.SIGTERM if ignored else signal.SIGHUP), output


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (None, "no section 'pipesync:'"),
        ({"method": "selsink"}, "method must be one of dear, ea_pipe, local_sgd, parameter_server, pipe_sgd, selsync"),
        ({"method": "selsync", "detla": 0.3}, "no setting 'detla'. It has: delta, lssr, aggregation"),
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
    assert "needs --config_file FILE" in capsys.readouterr().err
    assert main(["launch", "--config_file", str(tmp_path / "none.yaml"), "nowhere.py"]) == 2
    assert "none.yaml cannot be read" in capsys.readouterr().err
