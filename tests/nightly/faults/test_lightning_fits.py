"""A Trainer leaves nothing behind, and ends all its processes after Ctrl-C; torchrun names the rank at fault."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.commands import environment, run_together
from tests.support.harness import default_signals, on_ranks, slots
from tests.support.lightning_models import Classifier, train_loader, trainer
from tests.support.lost_ranks import wait_for


def fit_twice(directory: Path, name: str) -> list[Tensor]:
    of_launcher = dict(os.environ)  # which a Trainer removes
    run = trainer(name, 2, directory, max_epochs=1, limit_train_batches=4)
    results = []
    for epochs in (1, 2):
        model = Classifier()
        run.fit_loop.max_epochs = epochs
        os.environ.update(of_launcher)
        run.fit(model, train_loader())
        results.append(model.weights())
        assert run.strategy.method is None
    return results


@pytest.mark.parametrize("name", ["dear", "ea_pipe", "local_sgd", "parameter_server", "pipe_sgd", "selsync"])
def test_fitting_twice_with_one_trainer(name: str, tmp_path: Path) -> None:
    """All ranks end equal, and no thread is left, which the tests' ranks are checked for."""
    for mine, first in zip(*reversed(on_ranks(fit_twice, 2, tmp_path, name, init=False)), strict=True):
        assert torch.equal(mine, first)


SCRIPT = """
import sys
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
import lightning_pipesync

class Model(BoringModel):
    def training_step(self, batch, batch_idx):
        if batch_idx == 3 and sys.argv[1] == "raises" and self.global_rank == 1:
            raise KeyError("a bug in the loop")
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        print("an epoch", flush=True)

if __name__ == "__main__":
    trainer = Trainer(strategy="dear", devices=2, accelerator="cpu", max_epochs=10**6, logger=False,
                      enable_checkpointing=False, enable_progress_bar=False, limit_val_batches=0)
    trainer.fit(Model())
"""


def test_interrupting_a_script_ends_all_its_processes(tmp_path: Path) -> None:
    """The signal goes to the main process; nothing crashes on the way out, and nothing is left running.

    It is Ctrl-C's. A SIGTERM is Lightning's own affair: each rank leaves at a step of its own, whatever the strategy.
    """
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with slots(2):
        process = subprocess.Popen(
            [sys.executable, str(script), "runs"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=default_signals,
            env=environment(),
        )
        assert process.stdout is not None
        for line in process.stdout:
            if "an epoch" in line:
                break
        os.kill(process.pid, signal.SIGINT)
        try:
            output, _ = process.communicate(timeout=200)
            assert process.returncode == 1, output  # Lightning's own exit status
            assert "terminate called" not in output
            wait_for(lambda: not group_lives(process.pid), 200, "a process of the job is still running")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def group_lives(group: int) -> bool:
    with suppress(ProcessLookupError):
        os.killpg(group, 0)
        return True
    return False


def test_the_last_lines_of_torchrun_name_the_rank_at_fault(tmp_path: Path) -> None:
    """They are the traceback of the rank that ended first: of the one at fault, or of one that names it."""
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    [result] = run_together(([*command, tmp_path / "train.py", "raises"], environment()))
    assert result.returncode == 1, result.stdout
    said = result.stdout.rpartition("Root Cause (first observed failure):")[2].rstrip("=\n ")
    last = said.splitlines()[-1].strip()
    if re.search(r"^  rank +: 1 ", said, re.MULTILINE):
        assert last == "KeyError: 'a bug in the loop'", result.stdout
    else:
        assert re.match(r"(RuntimeError: )?Rank 1 \(host .*is at fault: it raised KeyError: 'a bug in", last), last
