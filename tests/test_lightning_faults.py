"""Bad input is named on every rank; a rank that dies, hangs or raises makes the others raise."""

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
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from lightning_pipesync import SelSyncConfig, SelSyncStrategy
from tests.case_table import Outcomes, launch_cases
from tests.harness import DIED, assert_refused, default_signals, kill_stopped_siblings, launch, raised
from tests.lightning_models import Classifier, dataset, train_loader, trainer


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("delta", -0.1),
        ("delta", math.nan),
        ("delta", "a lot"),
        ("lssr", -0.1),
        ("lssr", 1.0),
        ("lssr", math.nan),
        ("outer_lr", 0.0),
        ("outer_lr", math.inf),
        ("outer_momentum", 1.0),
        ("outer_momentum", -0.1),
        ("aggregation", "weights"),
        ("partition", "iid"),
        ("window", 0),
        ("window", 2.5),
        ("smoothing", 0.0),
        ("smoothing", 1.5),
        ("injection", (1.5, 0.5)),
        ("injection", (0.5, -0.5)),
        ("injection", (0.5, math.nan)),
        ("injection", (0.5,)),
        ("compression", "zip"),
        ("bucket_mb", 0),
        ("timeout_s", 0),
        ("timeout_s", math.inf),
    ],
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


TIMEOUT_S = 4


class Freezing(Classifier):
    """Rank 1 is frozen in the fifth step."""

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        if self.global_step == 4 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().training_step(batch, batch_idx)


def fit_freezing(directory: Path) -> tuple[tuple[str, str] | None, float]:
    saving = ModelCheckpoint(directory, save_on_exception=True)
    run = trainer(SelSyncStrategy(timeout_s=TIMEOUT_S), 2, directory, callbacks=[saving], enable_checkpointing=True)
    start = time.monotonic()
    outcome = raised(lambda: run.fit(Freezing(), train_loader()))
    seconds = time.monotonic() - start
    kill_stopped_siblings()
    return outcome, seconds


def test_a_frozen_rank_makes_the_others_raise(tmp_path: Path) -> None:
    """Though Lightning saves a checkpoint; no thread keeps the process alive."""
    (outcome, seconds), frozen = launch(fit_freezing, 2, tmp_path, init=False, may_die=(1,), timeout_s=100)
    assert outcome is not None
    assert outcome[0] == "RuntimeError"
    last = outcome[1].splitlines()[-1]
    assert last.startswith("Rank 1 (host ")
    assert f"timeout_s={TIMEOUT_S}" in last
    assert TIMEOUT_S < seconds < 24
    assert frozen == DIED


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
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 1, output  # Lightning's own exit status
        assert "terminate called" not in output
        deadline = time.monotonic() + 30
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


def fit_twin(directory: Path, name: str) -> tuple[str, set[str], Tensor]:
    import pytorch_lightning as twin

    class TwinModel(twin.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))

        def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
            return nn.functional.cross_entropy(self.layers(batch[1]), batch[2])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    run = twin.Trainer(
        strategy=name,
        devices=2,
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        default_root_dir=directory,
    )
    model = TwinModel()
    run.fit(model, train_loader())
    return (
        type(run.train_dataloader.sampler).__name__,
        set(run.callback_metrics),
        torch.cat([parameter.detach().flatten() for parameter in model.parameters()]),
    )


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
def trained(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    folder = tmp_path_factory.mktemp("trained")
    cases: dict[Any, Any] = {kind: partial(fit_badly, folder, kind) for kind in REFUSED}
    for name in METHODS:
        cases["twice", name] = partial(fit_twice, folder, name)
        cases["twin", name] = partial(fit_twin, folder, name)
    return launch_cases(cases, 2, init=False)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_go_wrong_is_named_on_every_rank(kind: str, trained: Outcomes) -> None:
    for outcome in trained[kind]:
        assert_refused(dict.fromkeys(REFUSED[kind], outcome))


@pytest.mark.parametrize("name", METHODS)
def test_the_twin_distribution(name: str, trained: Outcomes) -> None:
    outcomes = trained["twin", name]
    for sampler, logged, weight in outcomes:
        assert sampler == ("SelDPSampler" if name == "selsync" else "DistributedSampler")
        assert f"{name}/mib_sent" in logged
        assert torch.equal(weight, outcomes[0][2])


@pytest.mark.parametrize("name", METHODS)
def test_fitting_twice_leaves_nothing_behind(name: str, trained: Outcomes) -> None:
    for mine, first in zip(*reversed(trained["twice", name]), strict=True):
        assert torch.equal(mine, first)
