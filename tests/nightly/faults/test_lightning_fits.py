"""A Trainer names data that ranks cannot share, leaves nothing behind, and ends all its processes after Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from lightning_pipesync import SelSyncStrategy
from tests.quick.faults.test_shutdown import assert_torchrun_names_the_rank_at_fault
from tests.support.case_table import launch_cases
from tests.support.commands import environment
from tests.support.harness import default_signals, on_ranks, raised, slots
from tests.support.lightning_models import Classifier, dataset, train_loader, trainer
from tests.support.lost_ranks import wait_for

#: What is said of data that ranks cannot share.
REFUSED = {"small data": ["1 samples", "2 ranks"], "other lengths": ["[2, 4]", "limit_train_batches"]}


def fit_badly(directory: Path, kind: str) -> tuple[str, str] | None:
    if kind == "small data":
        loader = DataLoader(Subset(dataset(), [0]))
    else:
        loader = DataLoader(Subset(dataset(), range(8 + 8 * int(os.environ["RANK"]))), batch_size=4)
    run = trainer(SelSyncStrategy(), 2, directory, use_distributed_sampler=kind != "other lengths")
    return raised(lambda: run.fit(Classifier(), loader))


def test_data_that_ranks_cannot_share_are_named_on_every_rank(tmp_path: Path) -> None:
    outcomes = launch_cases({kind: partial(fit_badly, tmp_path, kind) for kind in REFUSED}, 2, init=False)
    for kind, words in REFUSED.items():
        for outcome in outcomes[kind]:
            assert outcome is not None
            assert outcome[0] == "ValueError"
            assert all(word in outcome[1] for word in words), outcome


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
    assert_torchrun_names_the_rank_at_fault(SCRIPT, tmp_path, "raises")
