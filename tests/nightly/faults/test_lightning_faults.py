"""Bad input is named on every rank; an interrupt ends all processes; nothing is left behind by a training."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader, Subset

from lightning_pipesync import SelSyncConfig, SelSyncStrategy
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import assert_refused, default_signals, raised
from tests.support.lightning_models import Classifier, dataset, train_loader, trainer

BAD: dict[str, tuple[Any, ...]] = {
    "delta": (-0.1, math.nan, "a lot"),
    "lssr": (-0.1, 1.0, math.nan),
    "outer_lr": (0.0, math.inf),
    "outer_momentum": (1.0, -0.1),
    "aggregation": ("weights",),
    "partition": ("iid",),
    "window": (0, 2.5),
    "smoothing": (0.0, 1.5),
    "injection": ((1.5, 0.5), (0.5, -0.5), (0.5, math.nan), (0.5,)),
    "compression": ("zip",),
    "bucket_mb": (0,),
    "timeout_s": (0, math.inf),
}


@pytest.mark.parametrize(
    ("setting", "value"), [(setting, value) for setting, values in BAD.items() for value in values]
)
@pytest.mark.parametrize("view", [SelSyncConfig, SelSyncStrategy])
def test_a_bad_setting_is_named(view: Any, setting: str, value: Any) -> None:
    with pytest.raises(ValueError, match=setting) as caught:
        view(**{setting: value})
    shown = value if not isinstance(value, tuple) or len(value) == 1 else next(v for v in value if not 0 <= v <= 1)
    assert repr(shown) in str(caught.value)


def fit_badly(directory: Path, kind: str) -> tuple[str, str] | None:
    if kind == "small data":
        loader = DataLoader(Subset(dataset(), [0]))
    else:
        loader = DataLoader(Subset(dataset(), range(8 + 8 * int(os.environ["RANK"]))), batch_size=4)
    run = trainer(SelSyncStrategy(), 2, directory, use_distributed_sampler=kind != "other lengths")
    return raised(lambda: run.fit(Classifier(), loader))


METHODS = ("dear", "ea_pipe", "local_sgd", "parameter_server", "pipe_sgd", "selsync")
#: What is said of data that ranks cannot share.
REFUSED = {"small data": ["1 samples", "2 ranks"], "other lengths": ["[2, 4]", "limit_train_batches"]}


SCRIPT = """
import torch, sys
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
import lightning_pipesync

if __name__ == "__main__":
    trainer = Trainer(strategy=sys.argv[1], devices=2, accelerator="cpu", max_epochs=10**6, logger=False,
                      enable_checkpointing=False, enable_progress_bar=False, limit_val_batches=0)
    class Noisy(BoringModel):
        def on_train_epoch_end(self):
            print("an epoch", flush=True)
    trainer.fit(Noisy())
"""


def test_interrupting_a_script_ends_all_its_processes(tmp_path: Path) -> None:
    """The signal goes to the main process; nothing crashes on the way out, and nothing is left running.

    It is Ctrl-C's. A SIGTERM is Lightning's own affair: each rank leaves at a step of its own, whatever the strategy.
    """
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script), "dear"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=default_signals,
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
        deadline = time.monotonic() + 120
        while _group_lives(process.pid):
            assert time.monotonic() < deadline, "a process of the job is still running"
            time.sleep(0.2)
    finally:
        if _group_lives(process.pid):
            os.killpg(process.pid, signal.SIGKILL)


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def fit_twice(directory: Path, name: str) -> list[Any]:
    run = trainer(name, 2, directory, max_epochs=1)
    results = []
    for epochs in (1, 2):
        model = Classifier()
        run.fit_loop.max_epochs = epochs
        with mock.patch.dict(os.environ):  # a Trainer removes what a launcher has set
            run.fit(model, train_loader())
        results.append(model.weights())
        assert run.strategy.method is None
        names = [thread.name for thread in threading.enumerate()]
        assert not any(name.startswith("pipesync") for name in names), names
    return results


@pytest.fixture(scope="module")
def trained(folder: Path) -> Outcomes:
    cases: dict[Any, Any] = {kind: partial(fit_badly, folder, kind) for kind in REFUSED}
    for name in METHODS:
        cases[name] = partial(fit_twice, folder, name)
    return launch_cases(cases, 2, init=False)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_go_wrong_is_named_on_every_rank(kind: str, trained: Outcomes) -> None:
    for outcome in trained[kind]:
        assert_refused(dict.fromkeys(REFUSED[kind], outcome))


@pytest.mark.parametrize("name", METHODS)
def test_fitting_twice_leaves_nothing_behind(name: str, trained: Outcomes) -> None:
    for mine, first in zip(*reversed(trained[name]), strict=True):
        assert torch.equal(mine, first)
